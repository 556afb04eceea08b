"""Writes what a string schema asks of a text as regular expressions that must match all of it, in Rust's syntax.

Reads the pattern with Python's own parser, as ``linear_pattern.py`` does, so that grammar and judge mean the same.
Refuses to know grammars. Read next: ``call_values.py`` (puts them into terminals).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

ANY_TEXT: Final = r"(.|\n)*"
MAX_LENGTH: Final = 4096
"""Characters up to which lengths are counted: each is a state of the matcher."""
MAX_REPEATS: Final = 1000

_CATEGORIES: Final = {
    op.CATEGORY_DIGIT: "0-9",
    op.CATEGORY_WORD: "A-Za-z0-9_",
    op.CATEGORY_SPACE: r"\t\n\x0B\f\r ",
}
_NEGATED: Final = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
}
_DATE: Final = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL: Final = r"[A-Za-z0-9]([A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,9}W|[0-9]{1,9}D(T[0-9]{1,9}H)?|T[0-9]{1,9}[HMS])",
    "email": rf"[A-Za-z0-9_+\-]{{1,32}}(\.[A-Za-z0-9_+\-]{{1,32}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,4}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.\-]{0,31}:([A-Za-z0-9._~:\/?#@!$&'()*+,;=\-]|%[0-9A-Fa-f]{2}){1,2048}",
}
"""Texts of each ``format``. Some are more than these; none of these is no such text."""


class NoPattern(ValueError):
    """What is asked of a text cannot be written down here."""


def text_patterns(schema: Mapping[str, Any]) -> list[str]:
    """Regular expressions that a text of a string schema matches, each as a whole; none: it may be any text.

    Raises NoPattern with the keyword that cannot be written, and the pattern where it is one.
    """
    patterns = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        if max(least, most or 0) > MAX_LENGTH:
            raise NoPattern("maxLength" if (most or 0) > MAX_LENGTH else "minLength")
        patterns.append(rf"(.|\n){{{int(least)},{'' if most is None else int(most)}}}")
    for pattern in schema.get("patterns", ()):
        try:
            patterns.append(_whole(pattern))
        except NoPattern:
            raise NoPattern("pattern", pattern) from None
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise NoPattern("format")
        patterns.append(FORMATS[schema["format"]])
    return patterns


def only_bound_above(patterns: Sequence[str]) -> bool:
    """Whether these regular expressions bind no more than how long a text may be."""
    return all(re.fullmatch(r"\(\.\|\\n\)\{0,[0-9]+\}", pattern) for pattern in patterns)


def plain(text: str) -> str:
    """A text as a regular expression that matches it alone."""
    return "".join(map(_character, text))


def _whole(pattern: str) -> str:
    """A pattern that is looked for anywhere, as one of the whole text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            items = list(parser.parse(pattern.replace(r"\/", "/")))
    except (re.error, RecursionError, OverflowError):
        raise NoPattern("pattern") from None
    if len(items) == 1 and items[0][0] is op.BRANCH:
        return f"({'|'.join(_unanchored(list(branch)) for branch in items[0][1][1])})"
    return _unanchored(items)


def _unanchored(items: list[Any]) -> str:
    """A sequence that may stand anywhere in a text, or where its anchors say."""
    before = behind = ANY_TEXT
    if items and items[0] in ((op.AT, op.AT_BEGINNING), (op.AT, op.AT_BEGINNING_STRING)):
        before, items = "", items[1:]
    if items and items[-1] in ((op.AT, op.AT_END), (op.AT, op.AT_END_STRING)):
        behind, items = "", items[:-1]
    return f"{before}{_sequence(items)}{behind}"


def _sequence(items: Any) -> str:
    return "".join(_item(code, argument) for code, argument in items)


def _item(code: Any, argument: Any) -> str:
    if code is op.LITERAL:
        return _character(chr(argument))
    if code is op.NOT_LITERAL:
        return f"[^{_character(chr(argument))}]"
    if code is op.ANY:
        return r"[^\n]"
    if code is op.IN:
        return _class(argument)
    if code is op.SUBPATTERN and not (argument[1] or argument[2]):
        return f"({_sequence(argument[3])})"
    if code is op.BRANCH:
        return f"({'|'.join(_sequence(branch) for branch in argument[1])})"
    if code in (op.MAX_REPEAT, op.MIN_REPEAT):
        least, most, body = argument
        if least > MAX_REPEATS or (most is not op.MAXREPEAT and most > MAX_REPEATS):
            raise NoPattern("pattern")
        return f"({_sequence(body)}){{{least},{'' if most is op.MAXREPEAT else most}}}"
    raise NoPattern("pattern")


def _class(items: list[Any]) -> str:
    parts, negated = [], ""
    for code, argument in items:
        if code is op.NEGATE:
            negated = "^"
        elif code is op.LITERAL:
            parts.append(_character(chr(argument)))
        elif code is op.RANGE:
            parts.append(f"{_character(chr(argument[0]))}-{_character(chr(argument[1]))}")
        elif argument in _CATEGORIES:
            parts.append(_CATEGORIES[argument])
        else:
            parts.append(f"[^{_CATEGORIES[_NEGATED[argument]]}]")
    return f"[{negated}{''.join(parts)}]"


def _character(character: str) -> str:
    if character.isascii() and (character.isalnum() or character in "_ "):
        return character
    if "\ud800" <= character <= "\udfff":
        raise NoPattern("pattern")
    return f"\\x{{{ord(character):X}}}"
