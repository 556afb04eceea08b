"""Makes Lark grammars safe to compile: the schemas in them are read like any other. Spells choices as a grammar.

Syntax: llguidance's variant of Lark. Refuses to know tokens. Read next: ``grammar.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from troth.errors import RequestError
from troth.text.grammar_schema import read_schema

LOOSE: Final = "x-loose"
"""Key of a schema of which what no grammar can promise is left out: that no second part of a ``oneOf`` matches."""
# What may hold "%json" without meaning it: strings, regular expressions and comments.
_PIECE: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<json>%json\b)')


def read_lark(source: str, *, settings: Callable[[Any, bool], Any], param: str) -> str:
    """The grammar with every ``%json`` schema in it bounded; its lines stay where they are.

    Args:
        source: As the caller wrote it.
        settings: Adds to a schema how its JSON is spelled, told whether it is strict: one with the key ``LOOSE`` is
            not.
        param: Where it stands in the request, for errors.

    Raises:
        RequestError: a schema that cannot be read, or that holds what cannot be enforced.
    """
    pieces: list[str] = []
    done = 0
    while (match := _PIECE.search(source, done)) is not None:
        pieces.append(source[done : match.end()])
        done = match.end()
        if match["json"]:
            text, done = _schema_text(source, done, param)
            where = f", line {_line(source, match.start())}"
            schema = read_schema(text, strict=True, param=param, where=where).schema
            schema = settings(schema, LOOSE not in json.loads(text))
            # JSON may hold line ends, a rule may not: errors after it must still name the right line.
            pieces.append(f" {json.dumps(schema)[:-1]}{chr(10) * text.count(chr(10))}}}")
    return "".join(pieces) + source[done:]


def choice_lark(choices: Sequence[str]) -> str:
    """A grammar of the choices, as one terminal: as a rule, each would be an item of the parser's own."""
    return f"start: CHOICE\nCHOICE: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}\n"


def _schema_text(source: str, start: int, param: str) -> tuple[str, int]:
    """The JSON object at or after ``start``, and where it ends."""
    begin = len(source) - len(source[start:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(source, begin)
    except RecursionError:
        raise _refusal("is nested too deeply", source, begin, param) from None
    except ValueError as error:
        raise _refusal(f"is not JSON: {error}", source, begin, param) from None
    if not isinstance(value, dict):
        raise _refusal("must be an object", source, begin, param)
    return source[begin:end], end


def _line(source: str, place: int) -> int:
    return source.count("\n", 0, place) + 1


def _refusal(message: str, source: str, place: int, param: str) -> RequestError:
    return RequestError(
        f"{param}: the schema after %json in line {_line(source, place)} {message}", param=param, code="invalid_schema"
    )
