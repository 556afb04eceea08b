"""Counts of drafts and of what became of them."""

from __future__ import annotations

from collections import Counter

from troth.contracts.speculation import DraftSourceName, SpeculationStats


class DraftTally:
    """Of one request, or of one engine."""

    def __init__(self) -> None:
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._by_depth: Counter[int] = Counter()

    def note(self, source: DraftSourceName, num_drafted: int, num_accepted: int) -> None:
        """Take in one step that verified drafts of it."""
        self._drafted[source] += num_drafted
        self._accepted[source] += num_accepted
        self._by_depth[num_accepted] += 1

    def stats(self, disabled_reason: str | None = None) -> SpeculationStats:
        """All so far."""
        rounds = self._by_depth
        return SpeculationStats(
            num_verifies=rounds.total(),
            num_drafted=self._drafted.total(),
            num_accepted=self._accepted.total(),
            accepted_by_depth=tuple(rounds[depth] for depth in range(1, max(rounds, default=0) + 1)),
            num_drafted_by_source=dict(self._drafted),
            num_accepted_by_source=dict(self._accepted),
            disabled_reason=disabled_reason,
        )
