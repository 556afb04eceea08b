"""Softmax attention whose output is scaled by a gate, over the model's own tokens or over a draft head's pairs.

Refuses to know names of tensors: ``models/hybrid_decoder.py`` builds it. Read next: ``attention.py``, the plain kind.
Legend: T tokens, R rows, B blocks per table, D model width, H heads of size D (THD), E outputs of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.nn.batch import Batch
from troth.nn.draft_head import LastPairs, Pairs
from troth.nn.linear import Linear
from troth.ops.attention import attention
from troth.ops.layer_kv import LayerKV
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write
from troth.ops.rows import Rows
from troth.ops.sigmoid_gate import sigmoid_gate


@dataclass(slots=True)
class GatedAttention:
    """Attention whose output is scaled, value by value, by a sigmoid of the input."""

    layer: int
    qkv: Linear
    gate: Linear
    out: Linear
    num_heads: int
    rotary: RotaryTable
    scale: float
    norms: HeadNorms

    def __call__(self, x_TD: Tensor, batch: Batch, cache: CacheStorage) -> Tensor:
        """As nn.decoder.Attention."""
        tables = batch.groups[cache.group_of[self.layer]]
        kv = cache.kv[self.layer]
        q_THD = self._rotated(self.qkv(x_TD, batch.rows), batch.positions_T, tables.slots_T, kv)
        out_THD = attention(q_THD, kv, tables.block_table_RB, batch.rows, self.scale)
        return self._gated(x_TD, out_THD, batch.rows)

    def write(self, x_TD: Tensor, pairs: Pairs, cache: CacheStorage) -> None:
        """As nn.draft_head.PairAttention."""
        self._rotated(self.qkv(x_TD, pairs.rows), pairs.positions_T, pairs.slots_T, cache.kv[self.layer])

    def look_back(self, x_RD: Tensor, pairs: LastPairs, cache: CacheStorage) -> Tensor:
        """As nn.draft_head.PairAttention."""
        qkv_RE, kv = self.qkv(x_RD, pairs.rows), cache.kv[self.layer]
        self._rotated(qkv_RE, pairs.positions_T, pairs.slots_T, kv)
        q_RHD = self._rotated(qkv_RE, pairs.positions_T, pairs.own_slots_R, kv)
        return self._gated(x_RD, attention(q_RHD, kv, pairs.block_table_RB, pairs.rows, self.scale), pairs.rows)

    def _rotated(self, qkv_TE: Tensor, positions_T: Tensor, slots_T: Tensor, kv: LayerKV) -> Tensor:
        return rotary_kv_write(qkv_TE, self.num_heads, positions_T, self.rotary, self.norms, slots_T, kv)

    def _gated(self, x_TD: Tensor, out_THD: Tensor, rows: Rows) -> Tensor:
        return self.out(sigmoid_gate(out_THD.flatten(1), self.gate(x_TD, rows)), rows)
