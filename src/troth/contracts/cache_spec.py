"""How many bytes each kind of cache needs and whether it can be rewound: facts, no storage.

Layers with the same needs form a *group*; each group of attention layers has one block pool, and one block table per
row. Capabilities are members of the spec, so nobody asks a cache what class it is.

| kind | state grows with | rewind | freed early |
|---|---|---|---|
| AttentionSpec, window None | every token | drop slots | never |
| AttentionSpec, window w | every token, the last w kept | drop slots inside the window | blocks before the window |
| RecurrentSpec | nothing: one state per row | restore a checkpoint | - |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from troth.contracts.names import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Layers that keep keys and values; the query at position p sees keys from max(0, p - window + 1) to p."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    value_dim: int
    element_bytes: int
    window: int | None = None
    """None: everything before is seen."""
    scale_bytes: int = 0
    """Beside each key and each value of a head, in formats that need it."""

    rewindable: ClassVar[bool] = True

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of the group, keys and values."""
        per_head = (self.head_dim + self.value_dim) * self.element_bytes + 2 * self.scale_bytes
        return BLOCK_TOKENS * self.num_kv_heads * per_head * len(self.layers)

    def blocks_for(self, num_tokens: int, chunk_tokens: int) -> int:
        """Most blocks a row of ``num_tokens`` holds at once when at most ``chunk_tokens`` are fed per step."""
        whole = -(-num_tokens // BLOCK_TOKENS)
        if self.window is None:
            return whole
        # A window that starts inside a block and a chunk that ends inside one each touch one block more.
        return min(whole, -(-(self.window - 1 + chunk_tokens) // BLOCK_TOKENS) + 1)

    def first_needed(self, position: int) -> int:
        """Index of the first block that a query at ``position`` or later still reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of one layer's state, for one row."""

    shape: tuple[int, ...]
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one row's share."""
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec:
    """Layers that fold the past into one state of fixed size per row; they own no blocks."""

    layers: tuple[int, ...]
    tensors: tuple[StateTensor, ...]
    """What each layer of the group keeps."""

    rewindable: ClassVar[bool] = False

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's live state over all layers of the group; a checkpoint costs the same."""
        return len(self.layers) * sum(tensor.num_bytes for tensor in self.tensors)


CacheSpec = AttentionSpec | RecurrentSpec


def recurrent_bytes(specs: tuple[CacheSpec, ...]) -> int | None:
    """Bytes of one row's whole recurrent state, and so of one checkpoint; None when the model keeps none."""
    groups = [spec for spec in specs if isinstance(spec, RecurrentSpec)]
    return sum(spec.state_bytes for spec in groups) if groups else None


def with_scales(specs: tuple[CacheSpec, ...], scale_bytes: int) -> tuple[CacheSpec, ...]:
    """The same groups in a cache format that keeps so many bytes beside each key and each value of a head."""
    return tuple(replace(spec, scale_bytes=scale_bytes) if isinstance(spec, AttentionSpec) else spec for spec in specs)


def attention_groups(specs: tuple[CacheSpec, ...]) -> tuple[AttentionSpec, ...]:
    """The groups that own block pools, in order; their index is the group number of plans and block tables."""
    return tuple(spec for spec in specs if isinstance(spec, AttentionSpec))
