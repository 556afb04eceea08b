"""Owns the text that has arrived and not yet been understood, and the few ways to move on in it.

Knows no format. Every move is a generator that yields when it needs more text, and decides by the text alone, never by
how it was cut: whatever is built from these moves reads a stream exactly as it reads the whole. Read next:
``format.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Final, TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work on a text that is still arriving: each ``yield`` asks for more, the return value is what was found."""

_SPACE: Final = re.compile(r"\s*")


class Malformed(Exception):
    """The text is not what the format allows here. The reader stands before the first character that does not fit."""


class Unclosed(Malformed):
    """The text ended inside."""


class NoCall(Malformed):
    """Text that is like a call, in a form that ordinary text has too, and is none."""


class TooLong(Malformed):
    """What is being read as one span is longer than any call may be."""


@lru_cache(maxsize=256)
def _search(literals: tuple[str, ...]) -> re.Pattern[str]:
    if not literals:
        return re.compile("(?!)")
    return re.compile("|".join(re.escape(item) for item in sorted(literals, key=len, reverse=True)))


@lru_cache(maxsize=256)
def _prefixes(literals: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """All proper prefixes, and the length of the longest."""
    found = frozenset(item[:end] for item in literals for end in range(1, len(item)))
    return found, max((len(item) for item in found), default=0)


class Reader:
    """A cursor over text in pieces. Consumed text is gone, except while a span is being recorded."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._span: list[str] | None = None
        self._num_left = 0  # characters the span may still have
        self.ended = False
        """No more text will come."""

    def feed(self, text: str) -> None:
        """Append a piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def start_span(self, max_characters: int) -> None:
        """From here on keep what is consumed; ``TooLong`` once it is more than ``max_characters``."""
        self._span = []
        self._num_left = max_characters

    def end_span(self) -> str:
        """The text consumed since ``start_span``."""
        text, self._span = "".join(self._span or ()), None
        return text

    def take(self, count: int) -> str:
        """Consume ``count`` characters that are there."""
        if self._span is None:
            text = self._text[self._at : self._at + count]
            self._at += count
            return text
        # The limit is met at the same character however the text was cut.
        short = min(count, self._num_left)
        text = self._text[self._at : self._at + short]
        self._at += short
        self._num_left -= short
        self._span.append(text)
        if short < count:
            raise TooLong("the call is longer than calls may be")
        return text

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Consume what ``pattern`` matches of the text that is there; it must match piece by piece as it does whole."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def peek(self) -> Steps[str]:
        """The next character, not consumed; empty at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def space(self, limit: int = 1 << 30) -> Steps[str]:
        """Consume white space, at most ``limit`` characters."""
        taken = ""
        while True:
            match = _SPACE.match(self._text, self._at)
            end = match.end() if match else self._at
            taken += self.take(min(end - self._at, limit - len(taken)))
            if len(taken) == limit or self._at < len(self._text) or self.ended:
                return taken
            yield

    def literal(self, literals: tuple[str, ...]) -> Steps[str]:
        """Consume the longest of ``literals`` that comes next; empty, and nothing consumed, when none does."""
        if not literals:
            return ""
        prefixes, longest = _prefixes(literals)
        while not self.ended:
            coming = self._text[self._at : self._at + longest + 1]
            if coming and coming not in prefixes:
                break
            yield
        match = _search(literals).match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def expect(self, *literals: str) -> Steps[str]:
        """``literal``, or Malformed."""
        found = yield from self.literal(literals)
        if not found:
            raise self.fault(f"expected {' or '.join(map(repr, literals))}", literals)
        return found

    def until(self, literals: tuple[str, ...], piece: Callable[[str], None]) -> Steps[str]:
        """Consume text up to and with the first of ``literals``, the longest where several begin at one place.

        The text before it goes to ``piece`` as soon as it cannot be the beginning of one. Returns the literal; empty
        when the text ended without one, all of it consumed.
        """
        pattern = _search(literals)
        prefixes, longest = _prefixes(literals)
        while True:
            match = pattern.search(self._text, self._at)
            start = match.start() if match else len(self._text)
            held = self._held_from(prefixes, longest)
            if held <= start and held < len(self._text) and not self.ended:
                start, match = held, None
            if start > self._at:
                piece(self.take(start - self._at))
            if match:
                return self.take(match.end() - match.start())
            if self.ended:
                return ""
            yield

    def word(self, ends: tuple[str, ...], limit: int, *, lines: bool = False) -> Steps[str]:
        """Consume the text before the first of ``ends``, not the end itself: at most ``limit`` characters.

        Nothing is consumed when there is no such word: Malformed. A new line ends the search unless ``lines``.
        """
        pattern = _search(ends)
        longest = max(map(len, ends))
        while True:
            match = pattern.search(self._text, self._at, self._at + limit + longest)
            text = self._text[self._at : match.start() if match else self._at + limit + longest]
            if match and len(text) <= limit and (lines or "\n" not in text):
                return self.take(len(text))
            if match or len(text) == limit + longest or ("\n" in text and not lines):
                raise Malformed(f"expected {' or '.join(map(repr, ends))}")
            if self.ended:
                raise Unclosed("the text ended inside a call")
            yield

    def run(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Consume characters that ``pattern`` (one of a class) matches. Malformed past ``limit`` of them."""
        taken = ""
        while True:
            character = yield from self.peek()
            if not character or not pattern.match(character):
                return taken
            if len(taken) == limit:
                raise Malformed(f"a name of more than {limit} characters")
            taken += self.take(1)

    def fault(self, message: str, wanted: tuple[str, ...] = ()) -> Malformed:
        """The error for text that does not fit, or for text that is over, perhaps in the middle of what was wanted."""
        rest = self._text[self._at :]
        over = self.ended and (not rest or any(item.startswith(rest) for item in wanted))
        return Unclosed("the text ended inside a call") if over else Malformed(message)

    def _held_from(self, prefixes: frozenset[str], longest: int) -> int:
        """Where the longest end of the text that begins a literal starts; the length of the text when none does."""
        length = len(self._text)
        for start in range(max(self._at, length - longest), length):
            if self._text[start:] in prefixes:
                return start
        return length
