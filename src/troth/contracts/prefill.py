"""The prefill planner: how far the next chunk of one prompt goes. A pure function of integers.

One prompt of ``length`` tokens is fed in chunks of at most ``chunk`` tokens. A chunk never runs past ``checkpoint_at``,
so that a checkpoint can be taken exactly there. With ``tail_split`` the last token is fed alone, so that its logits
come from the same width-1 computation as every later decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrefillPhase = Literal["chunk", "tail", "decode"]


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Feed positions ``start .. end - 1``."""

    start: int
    end: int
    final: bool
    """Whether this step reaches the end of the prompt, so that a token is sampled."""
    phase: PrefillPhase
    """decode: one token wide; chunk: a full chunk; tail: anything narrower than planned."""
    yields: bool
    """Whether the caller should look at other work before the next step."""
    checkpoint: bool
    """Whether a checkpoint belongs at ``end``."""


def next_prefill_step(
    length: int, position: int, chunk: int, *, tail_split: bool = False, checkpoint_at: int | None = None
) -> PrefillStep:
    """Plan the next step of a prompt.

    Args:
        length: prompt tokens, at least 1.
        position: tokens already fed, 0 <= position < length.
        chunk: most tokens per step, at least 1.
        tail_split: feed the last token alone.
        checkpoint_at: prompt position of a wanted checkpoint, 0 <= checkpoint_at <= length; at or behind
            ``position``, or at ``length``, it asks for nothing.

    Raises:
        ValueError: an argument is not an integer or out of bounds.
    """
    for name, value in (("length", length), ("position", position), ("chunk", chunk)):
        _require_int(name, value)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, not {chunk}")
    if not 0 <= position < length:
        raise ValueError(f"position must be in 0..{length - 1}, not {position}")
    if checkpoint_at is not None:
        _require_int("checkpoint_at", checkpoint_at)
        if not 0 <= checkpoint_at <= length:
            raise ValueError(f"checkpoint_at must be in 0..{length}, not {checkpoint_at}")
        if position < checkpoint_at < length:
            end = min(position + chunk, checkpoint_at)
            phase = _phase(end - position, chunk)
            return PrefillStep(position, end, False, phase, True, end == checkpoint_at)

    remaining = length - position
    if remaining > (1 if tail_split else chunk):
        width = min(chunk, remaining - 1) if tail_split else chunk
        left = remaining - width
        yields = left > 1 or not tail_split
        return PrefillStep(position, position + width, False, _phase(width, chunk), yields, False)
    return PrefillStep(position, length, True, _phase(remaining, chunk), False, False)


def _phase(width: int, chunk: int) -> PrefillPhase:
    if width == 1:
        return "decode"
    return "chunk" if width == chunk else "tail"


def _require_int(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r}")
