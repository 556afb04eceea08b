"""How long work reports that it is under way. Library code prints nothing: whoever asked decides what to show."""

from __future__ import annotations

from typing import Protocol


class LoadProgress(Protocol):
    """Called from the loading thread, at most some hundred times per load."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``stage`` is a few words (reading weights, warming up); ``done`` of ``total`` in bytes or steps."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Report to nobody."""


def stages_text(seconds: dict[str, float]) -> str:
    """Stages for a line of text: ``reading weights 3.1 s, warming up 2.0 s``; those of less than 0.1 s are left out."""
    return ", ".join(f"{stage} {taken:.1f} s" for stage, taken in seconds.items() if taken >= 0.1)
