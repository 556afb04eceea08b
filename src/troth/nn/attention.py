"""Self-attention with grouped heads over the paged cache, from parts: projections, rotation, optional head norms.

Legend: T tokens, D model width, E = (H + 2 K) head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.nn.batch import Batch
from troth.nn.linear import Linear
from troth.ops.attention import attention
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write


@dataclass(slots=True)
class SelfAttention:
    """One layer's attention."""

    layer: int
    qkv: Linear
    out: Linear
    num_heads: int
    rotary: RotaryTable
    scale: float
    window: int | None = None
    norms: HeadNorms | None = None

    def __call__(self, x_TD: Tensor, batch: Batch, cache: CacheStorage) -> Tensor:
        """float [T, D] -> float [T, D]; writes the tokens' keys and values to the cache."""
        kv = cache.kv[self.layer]
        tables = batch.groups[cache.group_of[self.layer]]
        q_THD = rotary_kv_write(
            self.qkv(x_TD), self.num_heads, batch.positions_T, self.rotary, self.norms, tables.slots_T, kv
        )
        out_THD = attention(q_THD, kv, tables.block_table_RB, batch.rows, self.scale, self.window)
        return self.out(out_THD.flatten(1))
