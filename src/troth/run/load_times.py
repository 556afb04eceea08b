"""How long each stage of a load takes: progress is passed on, with a look at the clock. Read next: ``assemble.py``."""

from __future__ import annotations

from typing import Final

from troth.contracts.ports import Clock
from troth.contracts.progress import LoadProgress

PREPARING: Final = "preparing"
"""What comes before the first stage that is told."""


class LoadTimes:
    """Stands between a load and whoever follows it, as a ``LoadProgress``."""

    def __init__(self, progress: LoadProgress, clock: Clock) -> None:
        self._progress = progress
        self._clock = clock
        self._stage, self._since = PREPARING, clock()
        self._seconds: dict[str, float] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """As contracts.progress.LoadProgress."""
        if stage != self._stage:
            self._leave(stage)
        self._progress(stage, done, total)

    def finish(self) -> dict[str, float]:
        """Seconds of each stage, in the order in which they were entered first; the last one ends now."""
        self._leave(self._stage)
        return dict(self._seconds)

    def _leave(self, stage: str) -> None:
        now = self._clock()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now
