"""The prefill planner's worked cases (reference: length, chunk, tail split, checkpoint position -> steps)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troth.contracts.prefill import PrefillStep, next_prefill_step

CASES = [
    # length, chunk, tail_split, checkpoint_at, steps as "start-end kind phase flags"
    (10, 4, True, None, ["0-4 chunk Y", "4-8 chunk Y", "8-9 decode", "9-10 final decode"]),
    (9, 4, True, None, ["0-4 chunk Y", "4-8 chunk", "8-9 final decode"]),
    (5, 4, True, None, ["0-4 chunk", "4-5 final decode"]),
    (2, 4, True, None, ["0-1 decode", "1-2 final decode"]),
    (1, 4, True, None, ["0-1 final decode"]),
    (1, 4, False, None, ["0-1 final decode"]),
    (10, 4, False, None, ["0-4 chunk Y", "4-8 chunk Y", "8-10 final tail"]),
    (8, 4, False, None, ["0-4 chunk Y", "4-8 final chunk"]),
    (10, 4, True, 6, ["0-4 chunk Y", "4-6 tail YS", "6-9 tail", "9-10 final decode"]),
    (10, 4, True, 9, ["0-4 chunk Y", "4-8 chunk Y", "8-9 decode YS", "9-10 final decode"]),
    (10, 4, False, 8, ["0-4 chunk Y", "4-8 chunk YS", "8-10 final tail"]),
    (4, 4, False, 3, ["0-3 tail YS", "3-4 final decode"]),
    (4, 4, False, 0, ["0-4 final chunk"]),
    (4, 4, False, 4, ["0-4 final chunk"]),
    (6, 4, False, 2, ["0-2 tail YS", "2-6 final chunk"]),
]


def steps_of(length: int, chunk: int, tail_split: bool, checkpoint_at: int | None) -> list[PrefillStep]:
    steps, position = [], 0
    while position < length:
        step = next_prefill_step(length, position, chunk, tail_split=tail_split, checkpoint_at=checkpoint_at)
        steps.append(step)
        position = step.end
    return steps


def as_text(step: PrefillStep) -> str:
    flags = "Y" * step.yields + "S" * step.checkpoint
    parts = [f"{step.start}-{step.end}", "final" * step.final, step.phase, flags]
    return " ".join(part for part in parts if part)


@pytest.mark.parametrize(("length", "chunk", "tail_split", "checkpoint_at", "expected"), CASES)
def test_planner_gives_the_worked_steps(
    length: int, chunk: int, tail_split: bool, checkpoint_at: int | None, expected: list[str]
) -> None:
    assert [as_text(step) for step in steps_of(length, chunk, tail_split, checkpoint_at)] == expected


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((4.0, 0, 4), "length"),
        ((True, 0, 4), "length"),
        ((4, 0, 0), "chunk"),
        ((4, -1, 4), "position"),
        ((4, 4, 4), "position"),
    ],
)
def test_planner_refuses_bad_numbers_by_name(arguments: tuple[int, int, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        next_prefill_step(*arguments)


@pytest.mark.parametrize("checkpoint_at", [-1, 5, 2.5])
def test_planner_refuses_a_checkpoint_outside_the_prompt(checkpoint_at: int) -> None:
    with pytest.raises(ValueError, match="checkpoint_at"):
        next_prefill_step(4, 0, 4, checkpoint_at=checkpoint_at)


@given(st.integers(1, 300), st.integers(1, 64), st.booleans(), st.none() | st.integers(0, 300))
def test_planner_covers_every_prompt_once_in_order(
    length: int, chunk: int, tail_split: bool, checkpoint_at: int | None
) -> None:
    if checkpoint_at is not None and checkpoint_at > length:
        checkpoint_at = length
    steps = steps_of(length, chunk, tail_split, checkpoint_at)
    assert [s.start for s in steps] == [0, *(s.end for s in steps[:-1])]
    assert steps[-1].end == length
    assert all(0 < s.end - s.start <= chunk for s in steps)
    assert [s.final for s in steps] == [False] * (len(steps) - 1) + [True]
    wanted = checkpoint_at is not None and 0 < checkpoint_at < length
    assert [s.end for s in steps if s.checkpoint] == ([checkpoint_at] if wanted else [])
    if tail_split:
        assert steps[-1].end - steps[-1].start == 1
