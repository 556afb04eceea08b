"""How many generations run at once, over all models of a server.

Read next: ``generation.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from troth.contracts.counted import counted
from troth.errors import Busy


class StreamLimit:
    """Counts generations, streamed or whole."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self.num_running = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be one of them. Raises Busy when there is no room."""
        if self.num_running >= self._max_streams:
            running = counted(self.num_running, "answer is", "answers are")
            raise Busy(f"{running} under way, the limit of this server; try again in a moment")
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
