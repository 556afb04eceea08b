"""How many bytes each kind of cache needs and whether it can be rewound: facts, no storage.

Layers with the same needs form a *group*; each group of attention layers has one block pool, and one block table per
row. Capabilities are members of the spec, so nobody asks a cache what class it is.

| kind | state grows with | rewind | freed early |
|---|---|---|---|
| AttentionSpec, window None | every token | drop slots | never |
| AttentionSpec, window w | every token, the last w kept | drop slots inside the window | blocks before the window |
| RecurrentSpec | nothing: one state per row | restore a checkpoint; over rejected drafts, by its trail | - |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Final

from troth.contracts.names import BLOCK_TOKENS

TRAIL_TOKENS: Final = 8
"""Most drafts that a row of a model with recurrent layers feeds in one step: its trails have room for no more."""


UNFED_TOKENS: Final = 64
"""Tokens of a row whose hidden states wait for its draft head at most: those since its last full block, and a step."""


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
    frontier_width: int = 0
    """Numbers, float32, that each block keeps besides: the hidden state of its last token, with which a draft head goes
    on behind the block. 0: no draft head has its layer here; else it has the last one."""
    guests: tuple[AttentionSpec, ...] = ()
    """Layers of a draft model that keep their keys and values in the same blocks, whatever their window."""

    rewindable: ClassVar[bool] = True

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of the group, guests included, keys and values."""
        of_guests = sum(guest.bytes_per_block for guest in self.guests)
        return self._layer_bytes * len(self.layers) + 4 * self.frontier_width + of_guests

    @property
    def _layer_bytes(self) -> int:
        per_head = (self.head_dim + self.value_dim) * self.element_bytes + 2 * self.scale_bytes
        return BLOCK_TOKENS * self.num_kv_heads * per_head

    @property
    def head_bytes(self) -> int:
        """Bytes that a draft head keeps of one row besides: a block, and hidden states that it was not fed yet."""
        if not self.frontier_width:
            return 0
        return self._layer_bytes + 4 * self.frontier_width * UNFED_TOKENS

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
    trail: tuple[StateTensor, ...] = ()
    """What each layer keeps besides of every draft of a row's last step: enough to take it into the state once it is
    known to be right. A checkpoint has none of it."""

    rewindable: ClassVar[bool] = False

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's live state over all layers of the group; a checkpoint costs the same."""
        return len(self.layers) * sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def trail_bytes(self) -> int:
        """Bytes of one row's trails over all layers of the group."""
        return len(self.layers) * TRAIL_TOKENS * sum(tensor.num_bytes for tensor in self.trail)


CacheSpec = AttentionSpec | RecurrentSpec


def recurrent_bytes(specs: tuple[CacheSpec, ...]) -> int | None:
    """Bytes of one row's whole recurrent state, and so of one checkpoint; None when the model keeps none."""
    groups = [spec for spec in specs if isinstance(spec, RecurrentSpec)]
    return sum(spec.state_bytes for spec in groups) if groups else None


def trail_bytes(specs: tuple[CacheSpec, ...]) -> int:
    """Bytes of one row's trails over all recurrent layers."""
    return sum(spec.trail_bytes for spec in specs if isinstance(spec, RecurrentSpec))


def head_bytes(specs: tuple[CacheSpec, ...]) -> int:
    """Bytes that a draft head keeps of one row, its blocks aside."""
    return sum(spec.head_bytes for spec in attention_groups(specs))


def with_scales(specs: tuple[CacheSpec, ...], scale_bytes: int) -> tuple[CacheSpec, ...]:
    """The same groups in a cache format that keeps so many bytes beside each key and each value of a head."""
    return tuple(replace(spec, scale_bytes=scale_bytes) if isinstance(spec, AttentionSpec) else spec for spec in specs)


def attention_groups(specs: tuple[CacheSpec, ...]) -> tuple[AttentionSpec, ...]:
    """The groups that own block pools, in order; their index is the group number of plans and block tables."""
    return tuple(spec for spec in specs if isinstance(spec, AttentionSpec))


def host_group(specs: tuple[CacheSpec, ...]) -> int | None:
    """Number of the attention group whose blocks can have guests, for they hold every token; None: there is none."""
    return next((group for group, spec in enumerate(attention_groups(specs)) if spec.window is None), None)


def with_guests(specs: tuple[CacheSpec, ...], guests: tuple[AttentionSpec, ...]) -> tuple[CacheSpec, ...]:
    """The same groups, the layers of a draft model in the blocks of the host group, numbered behind the model's own."""
    group = host_group(specs)
    assert group is not None, "no group keeps every token"
    host, first = attention_groups(specs)[group], 1 + max(layer for spec in specs for layer in spec.layers)
    moved = tuple(replace(guest, layers=tuple(first + layer for layer in guest.layers)) for guest in guests)
    return tuple(replace(host, guests=moved) if spec is host else spec for spec in specs)
