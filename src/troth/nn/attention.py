"""Self-attention with grouped heads over the paged cache, from parts: projections, rotation, optional head norms.

Legend: T tokens, D model width, E = (H + 2 K) head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import AttentionSpec
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
            self.qkv(x_TD, batch.rows), self.num_heads, batch.positions_T, self.rotary, self.norms, tables.slots_T, kv
        )
        out_THD = attention(q_THD, kv, tables.block_table_RB, batch.rows, self.scale, self.window)
        return self.out(out_THD.flatten(1), batch.rows)


def attention_specs(
    windows: Sequence[int | None], num_kv_heads: int, head_dim: int, element_bytes: int
) -> tuple[AttentionSpec, ...]:
    """The cache groups of layers that differ in their window only: one per window, full attention first.

    Args:
        windows: of each layer; None: everything before is seen.
        num_kv_heads: of every layer.
        head_dim: of keys and values.
        element_bytes: per cached number.
    """
    return tuple(
        AttentionSpec(
            layers=tuple(layer for layer, other in enumerate(windows) if other == window),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            element_bytes=element_bytes,
            window=window,
        )
        for window in sorted(set(windows), key=lambda window: window or 0)
    )
