"""Progress on standard error of what takes seconds, and nothing of what does not: a bar to a person, else plain lines.

Refuses to know what is under way. rich is imported only when there is something to show. Read next: ``terminal.py``.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from troth.cli.terminal import Terminal

DELAY_S: Final = 1.0
"""What is done sooner needs no bar..."""
PLAIN_DELAY_S: Final = 2.0
"""...and no line in a log."""


class Progress:
    """Shows how far one piece of work is while it is open as a context manager. A ``LoadProgress``; any thread.

    Where no person reads, a line says which stage is under way, and each that follows.

    Args:
        terminal: where to show it.
        stage: what is under way, until told otherwise.
        quiet: show nothing.
    """

    def __init__(self, terminal: Terminal, stage: str, *, quiet: bool = False) -> None:
        self._terminal = terminal
        self._stage, self._done, self._total = stage, 0, 0
        self._lock = threading.Lock()
        self._bar: Bar | None = None
        self._told: str | None = None
        """The stage of the last line."""
        self._stopped = quiet
        delay_s, show = (DELAY_S, self._show) if terminal.shows_progress else (PLAIN_DELAY_S, self._tell)
        self._timer = threading.Timer(delay_s, show)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        if not self._stopped:
            self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of ``stage``; ``total`` 0: unknown."""
        with self._lock:
            self._stage, self._done, self._total = stage, done, total
            self._update()
            if self._told is not None and not self._stopped:
                self._tell_stage()

    def stop(self) -> None:
        """Take the bar away, for good. Idempotent."""
        self._timer.cancel()
        with self._lock:
            self._stopped = True
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def _tell(self) -> None:
        with self._lock:
            if not self._stopped:
                self._tell_stage()

    def _tell_stage(self) -> None:
        if self._stage != self._told:
            self._told = self._stage
            # That nobody reads it is no reason to end the work.
            with suppress(OSError):
                self._terminal.note(f"{self._stage[:1].upper()}{self._stage[1:]} ...")

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        with self._lock:
            if self._stopped:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            console = Console(file=self._terminal.stderr)
            # Standard output is the answer's alone: rich must not redraw what is written there.
            self._bar = Bar(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._bar.add_task(self._stage, total=None)
            self._bar.start()
            self._update()

    def _update(self) -> None:
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, description=self._stage, completed=self._done, total=self._total or None)
