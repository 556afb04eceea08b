"""What steps cost, measured: those of decodes alone, and how much more the same rows cost with drafts.

One table for an engine, because a step belongs to all its rows. The first steps of a kind do not count: they may make a
recording, and take several times as long. Of later ones the median does, with and without drafts alike, so that a busy
machine changes no ratio. Refuses to know clocks. Read next: ``worth.py``.
"""

from __future__ import annotations

from collections import Counter, deque
from statistics import median
from typing import Final

REMEMBERED: Final = 9
"""Steps of one kind whose median counts."""
FIRST_STEPS: Final = 2
"""Steps of one kind that do not count."""
NEEDED_STEPS: Final = 2
"""Steps behind those before their cost is known."""
FIRST_GUESS: Final = 1.1
GUESS_PER_DRAFT: Final = 0.05
"""Cost of a step with drafts, over one without, before any was seen."""


class StepCosts:
    """Seconds of steps that only continue answers, by numbers of rows and drafts."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, deque[float]]] = {}
        """Rows, rounded -> drafts, rounded -> the last seconds."""
        self._num_steps: Counter[tuple[int, int]] = Counter()
        self._medians: dict[tuple[int, int], float] = {}

    def note(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Take in one step."""
        rows, drafts = _rounded(num_rows), _rounded(num_drafts)
        self._num_steps[rows, drafts] += 1
        if self._num_steps[rows, drafts] > FIRST_STEPS:
            kept = self._seconds.setdefault(rows, {}).setdefault(drafts, deque(maxlen=REMEMBERED))
            kept.append(seconds)
            self._medians[rows, drafts] = median(kept)

    def plain_s(self, num_rows: int) -> float | None:
        """Seconds of a step of so many rows without drafts; None while too few were seen."""
        rows = _rounded(num_rows)
        return self._medians[rows, 0] if 0 in self._known(rows) else None

    def most_drafts(self, num_rows: int) -> int:
        """The most drafts of such a step whose cost is known; 0 for none."""
        return max(self._known(_rounded(num_rows)), default=0)

    def ratio(self, num_rows: int, num_drafts: int) -> float:
        """Seconds of such a step over those without drafts, at least 1; guessed from what is known of others."""
        rows, drafts = _rounded(num_rows), _rounded(num_drafts)
        plain = self._medians.get((rows, 0), 0.0)
        seen = [number for number in self._known(rows) if number]
        if not plain or not seen:
            return FIRST_GUESS + GUESS_PER_DRAFT * drafts
        below = max((number for number in seen if number <= drafts), default=None)
        above = min((number for number in seen if number >= drafts), default=None)
        # One draft costs its own share and what any draft does: half of the nearest one's, when nothing else is known.
        if below is None or above is None:
            nearest = below if above is None else above
            assert nearest is not None
            more = self._medians[rows, nearest] / plain - 1
            return max(1.0, 1 + more * (0.5 + 0.5 * drafts / nearest))
        low, high = self._medians[rows, below] / plain, self._medians[rows, above] / plain
        share = (drafts - below) / (above - below) if above > below else 0.0
        return max(1.0, low + (high - low) * share)

    def _known(self, rows: int) -> list[int]:
        """Numbers of drafts whose cost is known."""
        return [drafts for drafts, kept in self._seconds.get(rows, {}).items() if len(kept) >= NEEDED_STEPS]


def _rounded(number: int) -> int:
    """Numbers up to 8 as they are, larger ones to three significant bits."""
    shift = max(0, number.bit_length() - 3)
    return number if number <= 8 else (number >> shift) << shift
