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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheStatus:
    """A snapshot. Counts of admissions and tokens are totals since the start, preempted requests counted again."""

    num_blocks: tuple[int, ...] = ()
    """Blocks that only the cache holds, by cache group: free memory that still remembers."""
    num_checkpoints: int = 0
    num_checkpoints_free: int = 0
    cached_bytes: int = 0
    """Of those blocks and checkpoints."""
    num_hit_tokens: int = 0
    num_admissions: dict[PrefixOutcome, int] = field(default_factory=dict)
    num_refused_tokens: dict[PrefixOutcome, int] = field(default_factory=dict)
    """Tokens that agreed and were not served, by reason."""
    num_evicted_blocks: int = 0
    num_evicted_checkpoints: int = 0
