"""Owns matching a regular expression in time linear in the text, whatever the expression.

The states of Thompson's construction (1968) are followed all at once, so nothing is ever tried twice. What needs memory
of the text (back-references, look-around) is refused. Syntax is read by Python's own parser. Read next:
``tool_schema.py``.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

MAX_STATES: Final = 4096
MAX_PATTERN_CHARACTERS: Final = 2048

_CATEGORIES: Final = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}
_ANCHORS: Final = {
    op.AT_BEGINNING: "start",
    op.AT_BEGINNING_STRING: "start",
    op.AT_END: "end",
    op.AT_END_STRING: "end",
    op.AT_BOUNDARY: "boundary",
    op.AT_NON_BOUNDARY: "no boundary",
}
# As in ECMA-262, a digit and a word character are ASCII.
_FLAGS: Final = re.ASCII | re.DOTALL
_WORD: Final = re.compile(r"\w", re.ASCII)


class PatternError(ValueError):
    """A pattern that cannot be matched here."""


class LinearPattern:
    """One compiled expression. The dialect of JSON Schema (ECMA-262) as far as Python reads it alike."""

    def __init__(self, pattern: str) -> None:
        """Raises PatternError when ``pattern`` is no expression, too large, or needs memory of the text."""
        if len(pattern) > MAX_PATTERN_CHARACTERS:
            raise PatternError(f"longer than {MAX_PATTERN_CHARACTERS} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = parser.parse(pattern.replace(r"\/", "/"))
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"not a regular expression: {error}") from None
        # A state is (test, next states): a test is None for a step without a character, a set, or an anchor.
        self._tests: list[re.Pattern[str] | str | None] = []
        self._next: list[list[int]] = []
        self._end = self._state(None)
        try:
            self._start = self._sequence(list(tree), self._end)
        except RecursionError:
            raise PatternError("nested too deeply") from None

    @staticmethod
    def of(pattern: str) -> LinearPattern:
        """The compiled pattern, remembered."""
        return _compiled(pattern)

    @property
    def num_states(self) -> int:
        """Time to match is characters times this."""
        return len(self._tests)

    def search(self, text: str) -> bool:
        """Whether the expression matches anywhere in ``text``."""
        current: set[int] = set()
        for place in range(len(text) + 1):
            reached = self._closure({*current, self._start}, _anchors_at(text, place))
            if self._end in reached:
                return True
            current = set()
            for state in reached:
                test = self._tests[state]
                if isinstance(test, re.Pattern) and test.match(text, place):
                    current.update(self._next[state])
        return False

    def _closure(self, states: set[int], anchors: frozenset[str]) -> set[int]:
        """States reached without a character, where these anchors hold."""
        reached, waiting = set(states), list(states)
        while waiting:
            state = waiting.pop()
            test = self._tests[state]
            for following in self._next[state] if test is None or test in anchors else ():
                if following not in reached:
                    reached.add(following)
                    waiting.append(following)
        return reached

    def _state(self, test: re.Pattern[str] | str | None, *following: int) -> int:
        if len(self._tests) == MAX_STATES:
            raise PatternError(f"needs more than {MAX_STATES} states")
        self._tests.append(test)
        self._next.append(list(following))
        return len(self._tests) - 1

    def _sequence(self, items: list[Any], then: int) -> int:
        for code, argument in reversed(items):
            then = self._item(code, argument, then)
        return then

    def _item(self, code: Any, argument: Any, then: int) -> int:
        if code is op.LITERAL:
            return self._state(re.compile(re.escape(chr(argument)), _FLAGS), then)
        if code is op.NOT_LITERAL:
            return self._state(re.compile(f"[^{re.escape(chr(argument))}]", _FLAGS), then)
        if code is op.ANY:
            return self._state(re.compile("."), then)
        if code is op.IN:
            return self._state(re.compile(_class(argument), _FLAGS), then)
        if code is op.AT:
            return self._state(_ANCHORS[argument], then)
        if code is op.SUBPATTERN:
            return self._sequence(list(argument[3]), then)
        if code is op.BRANCH:
            return self._state(None, *(self._sequence(list(branch), then) for branch in argument[1]))
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, items = argument
            return self._repeat(least, most, list(items), then)
        raise PatternError(f"{str(code).lower()} needs memory of the text and is not supported")

    def _repeat(self, least: int, most: Any, body: list[Any], then: int) -> int:
        if most is op.MAXREPEAT:
            loop = self._state(None, then)
            self._next[loop].append(self._sequence(body, loop))
            then = loop
        else:
            if most > MAX_STATES:
                raise PatternError(f"repeats more than {MAX_STATES} times")
            end = then
            for _ in range(most - least):
                then = self._state(None, self._sequence(body, then), end)
        if least > MAX_STATES:
            raise PatternError(f"repeats more than {MAX_STATES} times")
        for _ in range(least):
            then = self._sequence(body, then)
        return then


def _anchors_at(text: str, place: int) -> frozenset[str]:
    """What holds between two characters."""
    before = place > 0 and _WORD.match(text, place - 1) is not None
    behind = place < len(text) and _WORD.match(text, place) is not None
    held = {"no boundary" if before == behind else "boundary"}
    held |= {"start"} if place == 0 else set()
    held |= {"end"} if place == len(text) else set()
    return frozenset(held)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> LinearPattern:
    return LinearPattern(pattern)


def _class(items: list[Any]) -> str:
    """A character class as the text of one."""
    parts = []
    for code, argument in items:
        if code is op.NEGATE:
            parts.append("^")
        elif code is op.LITERAL:
            parts.append(re.escape(chr(argument)))
        elif code is op.RANGE:
            parts.append(f"{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}")
        else:
            parts.append(_CATEGORIES[argument])
    return f"[{''.join(parts)}]"
