"""What the prefix index tells its callers: what it knows of some tokens, where a row stands, what a row left, and sums.

Refuses to know how the tree changes. Next: ``prefix_index.py``, which makes all of these.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from troth.contracts.names import BLOCK_TOKENS
from troth.contracts.prefix_cache import PrefixOutcome
from troth.schedule.prefix_node import PrefixNode


@dataclass(slots=True)
class PrefixMatch:
    """What the index knows of some tokens."""

    usable: PrefixNode | None
    """Where the longest usable prefix ends; None or a root: nothing is usable."""
    deepest: PrefixNode | None
    """Up to where the tokens agree; looking again may start here."""
    outcome: PrefixOutcome

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return 0 if self.usable is None else self.usable.depth * BLOCK_TOKENS


@dataclass(slots=True)
class PrefixPlace:
    """How far one row has come in the tree; holds one lease on ``node``."""

    node: PrefixNode
    first_written: PrefixNode | None = None
    """The first node that holds anything this row computed."""


@dataclass(frozen=True, slots=True)
class Departure:
    """What a row left behind when it ended or was preempted, for whoever keeps it longer than memory does."""

    namespace: str
    token_ids: tuple[int, ...]
    """Of whole blocks."""
    ends: tuple[int, ...]
    """Blocks after which another request may begin, ascending; the last is all of them."""


@dataclass(slots=True)
class PrefixCounts:
    """Totals of admissions since the start."""

    num_hit_tokens: int = 0
    outcomes: Counter[PrefixOutcome] = field(default_factory=Counter)
    refused_tokens: Counter[PrefixOutcome] = field(default_factory=Counter)

    def note(self, match: PrefixMatch) -> None:
        """An admission starts from what was matched."""
        self.outcomes[match.outcome] += 1
        self.num_hit_tokens += match.num_tokens
        if match.deepest is not None and match.deepest.depth * BLOCK_TOKENS > match.num_tokens:
            self.refused_tokens[match.outcome] += match.deepest.depth * BLOCK_TOKENS - match.num_tokens
