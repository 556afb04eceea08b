"""Owns finding the end of a JSON value in text that is still arriving, and passing it on as it comes.

Knows brackets and strings only; whether the value is JSON at all is asked once it is whole (``coercion.parse_json``).
Read next: ``json_calls.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from troth.text.tool_formats.coercion import DuplicateKey, parse_json
from troth.text.tool_formats.reader import Malformed, Reader, Steps

MAX_DEPTH: Final = 64

_PLAIN: Final = re.compile(r'[^"{}\[\]]+')
_STRING: Final = re.compile(r'[^"\\]+')
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]+")
_CLOSER: Final = {"{": "}", "[": "]"}


def json_value(reader: Reader, piece: Callable[[str], None]) -> Steps[None]:
    """Consume one value, giving its text to ``piece``. Malformed where no value begins, brackets cross, or too deep."""
    first = yield from reader.peek()
    if first == '"':
        yield from _string(reader, piece)
    elif first in ("{", "["):
        yield from _brackets(reader, piece)
    elif first and _SCALAR.match(first):
        while True:
            piece(reader.take_run(_SCALAR))
            following = yield from reader.peek()
            if not (following and _SCALAR.match(following)):
                return
    else:
        raise reader.fault("expected a JSON value")


def _brackets(reader: Reader, piece: Callable[[str], None]) -> Steps[None]:
    closers: list[str] = []
    while True:
        character = yield from reader.peek()
        if character == '"':
            yield from _string(reader, piece)
        elif character in ("{", "["):
            if len(closers) == MAX_DEPTH:
                raise Malformed(f"nested deeper than {MAX_DEPTH}")
            closers.append(_CLOSER[character])
            piece(reader.take(1))
        elif character in ("}", "]"):
            if character != closers[-1]:
                raise Malformed(f"expected {closers[-1]!r}, found {character!r}")
            closers.pop()
            piece(reader.take(1))
            if not closers:
                return
        elif character:
            piece(reader.take_run(_PLAIN))
        else:
            raise reader.fault("expected the end of a JSON value")


def _string(reader: Reader, piece: Callable[[str], None]) -> Steps[None]:
    piece(reader.take(1))
    while True:
        character = yield from reader.peek()
        if character == "\\":
            piece(reader.take(1))
            if not (yield from reader.peek()):
                raise reader.fault("expected the end of a string")
            piece(reader.take(1))
        elif character:
            piece(reader.take(1) if character == '"' else reader.take_run(_STRING))
            if character == '"':
                return
        else:
            raise reader.fault("expected the end of a string")


def json_key(reader: Reader) -> Steps[str]:
    """Consume a string with the colon behind it and the white space around both; the key, decoded."""
    parts: list[str] = []
    if (yield from reader.peek()) != '"':
        raise reader.fault("expected a key in quotes")
    yield from _string(reader, parts.append)
    yield from reader.space()
    yield from reader.expect(":")
    yield from reader.space()
    return str(decoded("".join(parts)))


def decoded(text: str) -> object:
    """A JSON value. Malformed when it is none."""
    try:
        return parse_json(text)
    except DuplicateKey as error:
        raise Malformed(f"the key {error.args[0]!r} is given twice") from None
    except ValueError as error:
        raise Malformed(f"not JSON: {error}") from None
