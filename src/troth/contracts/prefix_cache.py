"""What the prompt cache tells of itself: how much it holds, and what became of those who asked.

The cache is ``schedule/prefix_index.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PrefixOutcome = Literal["hit", "miss", "no_checkpoint", "window_lost", "off", "prompt_logprobs"]
"""What an admission got: every whole block that agrees (hit), nothing because nothing agrees (miss), fewer tokens than
agree because a recurrent state was not saved there or keys inside a sliding window were given up, or nothing because
the request is not to use the cache, or wants log-probabilities that only computing its prompt gives.
"""


RestoreOutcome = Literal["restored", "nothing", "known", "slower", "no_room", "damaged", "late"]
"""What became of a prompt that was looked for on disk: it came back (restored), nothing of it is there, memory has as
much of it, computing is faster than reading, the pools have no room, its files are damaged, or the request went on or
ended without it because it took too long (late).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCacheContents:
    """What a folder holds of one kind for one model and its numbers."""

    namespace: str
    """Of model, numbers and layout; hex."""
    label: str
    """What its last writer called it."""
    kind: str
    """kv0, kv1...: keys and values of a cache group; state: recurrent states."""
    num_files: int
    num_blocks: int
    """Or states."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCacheStatus:
    """The disk tier, a snapshot. Counts are this process's, since the start; the folder may serve several."""

    folder: str
    num_bytes: int
    """Of all files, whoever wrote them."""
    quota_bytes: int
    free_bytes: int = 0
    """Of the disk, as of the last file that this process wrote."""
    num_written: int = 0
    """Files."""
    num_dropped: int = 0
    """Blocks that were not kept, because writing did not keep up or they were not finite; in pieces."""
    num_damaged: int = 0
    """Files that were not what they should be, and were removed."""
    num_evicted: int = 0
    """Files that made room for others."""
    read_bytes_per_s: float = 0.0
    """How fast files are read and proved; 0: not measured yet."""
    prefill_tokens_per_s: float = 0.0
    """How fast prompts are computed, which reading must beat; 0: not measured yet."""
    num_restored_tokens: int = 0
    num_restores: dict[RestoreOutcome, int] = field(default_factory=dict)
    trouble: str = ""
    """Why nothing is written any more; empty while all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """Tokens whose state stays in the cache until somebody unpins them."""

    name: str
    num_tokens: int
    num_bytes: int
    """What it shares with other pins counts for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStatus:
    """A snapshot. Counts of admissions and tokens are totals since the start, preempted requests counted again."""

    num_blocks: tuple[int, ...] = ()
    """Blocks that only the cache holds, by cache group: free memory that still remembers."""
    num_checkpoints: int = 0
    num_checkpoints_free: int = 0
    cached_bytes: int = 0
    """Of those blocks and checkpoints."""
    pool_bytes: int = 0
    """Of all blocks and checkpoints there are: cached, free, and held by requests and pins."""
    free_bytes: int = 0
    """Of those that hold nothing."""
    num_hit_tokens: int = 0
    num_admissions: dict[PrefixOutcome, int] = field(default_factory=dict)
    num_refused_tokens: dict[PrefixOutcome, int] = field(default_factory=dict)
    """Tokens that agreed and were not served, by reason."""
    num_evicted_blocks: int = 0
    num_evicted_checkpoints: int = 0
    pins: tuple[PinnedPrefix, ...] = ()
    """In order of pinning."""
    pinned_bytes: int = 0
    """Of all pins together, not part of ``cached_bytes``."""
    disk: DiskCacheStatus | None = None
    """What outlives the process; None: nothing does."""
