"""Ctrl-C while an answer is under way: the first one stops the answer, the second one the program.

Refuses to know what an answer is. Read next: ``answer.py``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self


class StopOnInterrupt:
    """While open as a context manager, the first SIGINT calls ``stop`` instead of raising KeyboardInterrupt.

    An exception raised at any bytecode could lose an event that was already taken off the stream; stopping the
    stream loses nothing. Opened outside the main thread it changes nothing, as signals arrive only there.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._on_main_thread = threading.current_thread() is threading.main_thread()
        self.interrupted = False
        """Whether the first SIGINT has come."""

    def __enter__(self) -> Self:
        if self._on_main_thread:
            self._former = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._on_main_thread:
            signal.signal(signal.SIGINT, self._former)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        # Not called here: the handler may run while this thread holds a lock that ``stop`` needs.
        threading.Thread(target=self._stop, name="troth-stop", daemon=True).start()
