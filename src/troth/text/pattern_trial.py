"""Finds regular expressions that a text could make too much work, by following such a text before a request is taken.

What a pattern costs shows only on the way: each token that may come next is followed through it. Repetitions that may
match the same text multiply. Refuses to know grammars and schemas. Read next: ``grammar.py`` (asks),
``linear_pattern.py`` (how large a pattern is).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from re import error as SyntaxFault
from typing import TYPE_CHECKING, Any, Final, TypeVar

from troth.text.linear_pattern import MAX_STATES, LinearPattern, PatternError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Place = TypeVar("Place")

MAX_TRIED: Final = 8
"""Patterns of one grammar that are tried, the largest first: one takes a tenth of a second where it is hostile."""
_FEWEST_STATES: Final = 24
"""A pattern of fewer has no room for repetitions that multiply: an address of mail has ten."""
_TRIAL_CHARACTERS: Final = 96
_MASK_EVERY: Final = 6
_MAX_LITERALS: Final = 16


def suspects(patterns: Iterable[tuple[Place, str]]) -> list[tuple[Place, str]]:
    """Those of some patterns, each with its place, that are worth a trial, the largest first."""
    sized = {pattern: (_num_states(pattern), place) for place, pattern in patterns}
    large = [(size, place, pattern) for pattern, (size, place) in sized.items() if size >= _FEWEST_STATES]
    large.sort(key=lambda one: -one[0])
    return [(place, pattern) for _, place, pattern in large[:MAX_TRIED]]


def takes_too_much(matcher: LLMatcher, tokens: LLTokenizer, pattern: str, opening: str = "") -> bool:
    """Whether a text of the pattern's own characters brings a matcher of it to its limits.

    Args:
        matcher: At the start; only for this.
        tokens: Of its vocabulary.
        pattern: As the caller wrote it.
        opening: What stands before a text of the pattern.
    """
    literals = _literals(pattern)
    chosen = random.Random(0)  # the same answer every time
    return any(
        _is_exhausting(matcher.deep_copy(), tokens, opening, chosen.choices(texts, k=_TRIAL_CHARACTERS))
        for texts in (literals[:1], literals)
    )


def _is_exhausting(matcher: LLMatcher, tokens: LLTokenizer, opening: str, text: list[str]) -> bool:
    """Whether a matcher fails on the way through a text, less the characters that cannot come."""
    for place, character in enumerate([*opening, *text]):
        ids = tokens.tokenize_bytes(character.encode())
        if matcher.is_stopped() or matcher.validate_tokens(ids) < len(ids):
            continue
        matcher.consume_tokens(ids)
        if place % _MASK_EVERY == 0:
            matcher.compute_bitmask()
    return is_exhausted(matcher)


def is_exhausted(matcher: LLMatcher) -> bool:
    """Whether a matcher failed at the limits of its work, and not at what it was given."""
    return matcher.is_error() and is_exhausted_by(matcher.get_error())


def is_exhausted_by(error: str) -> bool:
    """The same of the error by which it failed."""
    return "lexer error: too many" in error


def _num_states(pattern: str) -> int:
    """How large a pattern with repetitions is; 0 without any."""
    if not any(mark in pattern for mark in "*+{"):
        return 0
    try:
        return LinearPattern.of(pattern).num_states
    except PatternError:  # not of this dialect, or too large
        return MAX_STATES


def _literals(pattern: str) -> list[str]:
    """Characters that a pattern names."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = dict.fromkeys(_named(parser.parse(pattern)))
    except (SyntaxFault, RecursionError, OverflowError):
        found = dict.fromkeys(character for character in pattern if character.isalnum())
    return list(found)[:_MAX_LITERALS] or ["a"]


def _named(items: Any) -> Iterator[str]:
    for code, argument in items:
        if code is op.LITERAL or code is op.RANGE:
            character = chr(argument if code is op.LITERAL else argument[0])
            if character.isprintable() and character not in '"\\':
                yield character
        elif code is op.IN:
            yield from _named(argument)
        elif code is op.SUBPATTERN:
            yield from _named(argument[3])
        elif code is op.BRANCH:
            for branch in argument[1]:
                yield from _named(branch)
        elif code in (op.MAX_REPEAT, op.MIN_REPEAT):
            yield from _named(argument[2])
