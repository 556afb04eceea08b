"""What a model will need in bytes, computed from headers before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One cache group's share of the plan."""

    name: str
    num_blocks: int
    bytes_per_block: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the group's whole pool."""
        return self.num_blocks * self.bytes_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStatus:
    """What an engine's process holds, whatever was planned; main memory, or that of its device."""

    held_bytes: int
    """As of the last reading; 0: not known on this system."""
    soft_bytes: int
    """Above it the prompt cache makes room."""
    hard_bytes: int
    """Above it new requests are refused."""
    num_shed_blocks: int = 0
    """Cached blocks that made room."""
    num_refused: int = 0
    """Requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCachePlan:
    """What the prompt cache may take of a disk."""

    folder: str
    quota_bytes: int
    used_bytes: int
    """By its files now."""
    free_bytes: int
    """Of the disk, its files aside."""

    @property
    def fits(self) -> bool:
        """Whether the disk has room for all of the quota."""
        return self.quota_bytes <= self.used_bytes + self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the bytes go. ``fits`` compares ``total_bytes`` with ``usable_bytes``."""

    device: str
    dtype: str
    weights_bytes: int
    """Weights as they will lie in memory (after repacking), not as they lie on disk."""
    groups: tuple[GroupPlan, ...]
    state_bytes: int
    """Recurrent state of all rows, with what they keep of drafts and for a draft head."""
    transient_bytes: int
    """Activations and workspaces of one step."""
    reserve_bytes: int
    """Left alone for the rest of the process."""
    usable_bytes: int
    context_tokens: int
    """min(declared limit, configured limit, what the pools hold)."""
    declared_context_tokens: int
    max_rows: int
    decisions: tuple[str, ...] = ()
    """Why the numbers are what they are, one sentence each."""
    num_checkpoints: int | None = None
    """Recurrent states the prompt cache can keep; None: the model has no recurrent layers."""
    bytes_per_checkpoint: int = 0
    disk_cache: DiskCachePlan | None = None
    """Where the prompt cache outlives the process; None: it does not. No part of any sum here."""

    @property
    def prompt_cache_bytes(self) -> int:
        """Most bytes of the prompt cache in memory: it has what requests leave of the pools, and of the checkpoints."""
        return self.kv_bytes + self.checkpoint_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return (self.num_checkpoints or 0) * self.bytes_per_checkpoint

    @property
    def kv_bytes(self) -> int:
        """Bytes of all block pools."""
        return sum(group.total_bytes for group in self.groups)

    @property
    def total_bytes(self) -> int:
        """Everything the plan asks for."""
        cache = self.kv_bytes + self.state_bytes + self.checkpoint_bytes
        return self.weights_bytes + cache + self.transient_bytes + self.reserve_bytes

    @property
    def fits(self) -> bool:
        """Whether the plan can be loaded."""
        return self.context_tokens > 0 and self.total_bytes <= self.usable_bytes
