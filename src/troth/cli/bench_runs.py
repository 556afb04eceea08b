"""What ``troth bench`` measures of an engine: tokens per second of prompts and answers, and what drafts make of them.

Prompts are token ids and the prompt cache is left out, so that all of it is computed; ends of answers are ignored, so
that the number of tokens is known. Refuses to know how figures are shown (``bench.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from troth.contracts.counted import counted
from troth.contracts.speculation import SpeculationStats
from troth.errors import CapabilityUnavailable, TrothError

if TYPE_CHECKING:
    from troth.answer_stream import Reply
    from troth.library import Engine

SHORT_PROMPT: Final = 16
"""Tokens before an answer that hardly reads its cache."""
_COMPUTED: Final[dict[str, Any]] = {"temperature": 0, "ignore_eos": True, "prompt_cache": False, "speculation": "off"}
_PROGRAM: Final = '''def area(width, height):
    """The area of a rectangle."""
    return width * height


def volume(width, height, depth):
    """The volume of a box."""
    return area(width, height) * depth
'''
_COPY: Final = f"Repeat this program exactly.\n\n{_PROGRAM}\n\nHere it is again:\n\n{_PROGRAM[:60]}"
_QUESTION: Final = "Name ten cities and say one thing about each of them."
Told = Callable[[], None]
"""Called after every run."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, once per repetition."""

    name: str
    tokens_per_s: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of the repetitions."""
        return median(self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class DraftedFigure:
    """The same answer without drafts and with them."""

    exercise: str
    off: Figure
    drafted: Figure
    stats: SpeculationStats
    """Of the last repetition."""

    @property
    def ratio(self) -> float:
        """How many times as fast drafts make it."""
        return self.drafted.median / self.off.median


def num_runs(rows: int, repetitions: int) -> int:
    """Answers, or batches of them, that ``speeds`` asks for; the first ones warm up."""
    return (2 + (rows > 1)) * (1 + repetitions)


def speeds(
    engine: Engine, *, prompt_tokens: int, num_tokens: int, rows: int, repetitions: int, told: Told
) -> list[Figure]:
    """Prompt, answer behind a short prompt and behind this one, and, for several ``rows``, answers beside each other.

    Args:
        engine: answers nobody else meanwhile.
        prompt_tokens: of the long prompt.
        num_tokens: of an answer, the first one not counted.
        rows: answers at once.
        repetitions: of each figure.
        told: called after every run.
    """
    prompt = Figure(f"prompt of {counted(prompt_tokens, 'token')}")
    short, long = (Figure(f"answer after {counted(tokens, 'token')}") for tokens in (SHORT_PROMPT, prompt_tokens))
    batch = Figure(f"{rows} answers at once after {SHORT_PROMPT} tokens")
    for repetition in range(1 + repetitions):
        measured: list[tuple[Figure, float]] = []
        reply = _answer(engine, SHORT_PROMPT, num_tokens)
        measured.append((short, _speed(num_tokens, reply.timings.decode_s)))
        told()
        reply = _answer(engine, prompt_tokens, num_tokens)
        measured.append((prompt, _speed(prompt_tokens, reply.timings.prefill_s)))
        measured.append((long, _speed(num_tokens, reply.timings.decode_s)))
        told()
        if rows > 1:
            prompts = [_ids(engine, SHORT_PROMPT, row) for row in range(rows)]
            replies = engine.complete_all(prompts, max_tokens=num_tokens + 1, **_COMPUTED)
            seconds = max(one.timings.decode_s for one in replies)
            measured.append((batch, _speed(rows * num_tokens, seconds)))
            told()
        if repetition:
            for figure, speed in measured:
                figure.tokens_per_s.append(speed)
    return [prompt, short, long] + ([batch] if rows > 1 else [])


def drafted_exercises(engine: Engine) -> Iterator[tuple[str, Callable[..., Reply]]]:
    """Exercises by name, and what runs each: one that repeats its prompt, and one that does not."""
    yield "copying a program", lambda **options: engine.complete(_COPY, ignore_eos=True, **options)
    try:
        engine.chat(_QUESTION, max_tokens=1)
    except CapabilityUnavailable:
        yield "continuing a sentence", lambda **options: engine.complete("The first bridge over", **options)
        return
    yield "answering a question", lambda **options: engine.chat(_QUESTION, **options)


def drafted_speed(
    exercise: str, run: Callable[..., Reply], *, num_tokens: int, repetitions: int, told: Told
) -> DraftedFigure:
    """One exercise without drafts and with those of the engine's sources, in turn. Raises TrothError: they differ."""
    off, drafted = Figure(f"{exercise}, no drafts"), Figure(f"{exercise}, drafted")
    stats = SpeculationStats()
    for repetition in range(1 + repetitions):
        plain = run(max_tokens=num_tokens + 1, temperature=0, speculation="off")
        told()
        reply = run(max_tokens=num_tokens + 1, temperature=0)
        told()
        if (reply.text, reply.usage.num_completion_tokens) != (plain.text, plain.usage.num_completion_tokens):
            raise TrothError(f"{exercise}: the answer with drafts differs from the one without; please report this")
        stats = reply.speculation or stats
        if repetition:
            for figure, one in ((off, plain), (drafted, reply)):
                figure.tokens_per_s.append(_speed(one.usage.num_completion_tokens - 1, one.timings.decode_s))
    return DraftedFigure(exercise, off, drafted, stats)


def _answer(engine: Engine, prompt_tokens: int, num_tokens: int) -> Reply:
    return engine.complete(_ids(engine, prompt_tokens), max_tokens=num_tokens + 1, **_COMPUTED)


def _speed(num_tokens: int, seconds: float) -> float:
    # An answer may end with its first token, before any second has passed.
    return num_tokens / max(seconds, 1e-9)


def _ids(engine: Engine, num_tokens: int, row: int = 0) -> list[int]:
    """Ids of all parts of the vocabulary but its very beginning, where control tokens often are."""
    first = min(16, engine.info.vocab_size - 1)
    return [first + (7919 * (row + 1) + 31 * i) % (engine.info.vocab_size - first) for i in range(num_tokens)]
