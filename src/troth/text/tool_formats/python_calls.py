"""Bodies that are calls in Python's notation: ``[f(city='Paris', n=1), g()]``.

Sources: templates and replies of LFM2, Llama 4, OLMo 3, ToolACE, MiniCPM 3. Literals only, of Python or JSON; nothing
is evaluated. Refuses to know markers: those are in the table of each format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from troth.text.tool_formats.coercion import escaped
from troth.text.tool_formats.json_scan import MAX_DEPTH
from troth.text.tool_formats.notation import PYTHON_LITERALS, ArgumentNotation
from troth.text.tool_formats.reader import Malformed, Reader, Steps
from troth.text.tool_formats.unit import ArgumentWriter, Unit

_NAME: Final = re.compile(r"[\w.\-:/]")
_WRITTEN: Final = r"[A-Za-z0-9_.\-:/]+"
_WORD: Final = re.compile(r"[\w.+\-]")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS: Final = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_HEX: Final = re.compile(r"[0-9A-Fa-f]")
_MAX_NAME_CHARACTERS: Final = 256
_MAX_NUMBER_CHARACTERS: Final = 1024
_PLAIN: Final = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """How the calls are laid out."""

    brackets_required: bool = False
    lines: bool = False
    """Calls without brackets may follow each other on lines."""
    fence: tuple[str, str] = ("", "")
    """What stands before the first call and behind the last."""

    @property
    def notation(self) -> ArgumentNotation:
        """How a call is written behind its name."""
        return ArgumentNotation(
            names=_WRITTEN,
            keys=_WRITTEN,
            open="(",
            before_key="",
            before_value="=",
            before_text=None,
            separator=", ",
            close=")",
            literals=PYTHON_LITERALS,
        )

    def __call__(self, reader: Reader, unit: Unit, opener: str) -> Steps[None]:
        """Read one unit."""
        yield from reader.space()
        if self.fence[0]:
            yield from reader.expect(self.fence[0])
        yield from self._calls(reader, unit)
        if self.fence[1]:
            yield from reader.space()
            yield from reader.expect(self.fence[1])

    def _calls(self, reader: Reader, unit: Unit) -> Steps[None]:
        yield from reader.space()
        bracket = yield from reader.literal(("[",))
        if not bracket and self.brackets_required:
            raise reader.fault("expected '['")
        while True:
            yield from reader.space()
            yield from _call(reader, unit)
            yield from reader.space()
            if bracket:
                if (yield from reader.expect(",", "]")) == "]":
                    return
            elif not self.lines or not _NAME.match((yield from reader.peek()) or " "):
                return


def _call(reader: Reader, unit: Unit) -> Steps[None]:
    name = yield from reader.run(_NAME, _MAX_NAME_CHARACTERS)
    if not name:
        raise reader.fault("expected the name of a tool")
    yield from reader.expect("(")
    unit.begin(name)
    writer = ArgumentWriter(unit)
    yield from reader.space()
    if not (yield from reader.literal((")",))):
        while True:
            key = yield from reader.run(_NAME, _MAX_NAME_CHARACTERS)
            yield from reader.space()
            yield from reader.expect("=")
            yield from reader.space()
            writer.raw(key)
            yield from _value(reader, unit, 0)
            yield from reader.space()
            if (yield from reader.expect(",", ")")) == ")":
                break
            yield from reader.space()
    writer.end()


def _value(reader: Reader, unit: Unit, depth: int) -> Steps[None]:
    """Consume one literal and write it as JSON."""
    if depth > MAX_DEPTH:
        raise Malformed(f"nested deeper than {MAX_DEPTH}")
    first = yield from reader.peek()
    if first in ("'", '"'):
        unit.arguments('"')
        yield from string(reader, lambda text: unit.arguments(escaped(text)))
        unit.arguments('"')
    elif first in ("[", "("):
        yield from _items(reader, unit, depth)
    elif first == "{":
        yield from _members(reader, unit, depth)
    else:
        word = yield from reader.run(_WORD, _MAX_NUMBER_CHARACTERS)
        text = _WORDS.get(word, word)
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            raise reader.fault("expected a literal")
        unit.arguments(text)


def _items(reader: Reader, unit: Unit, depth: int) -> Steps[None]:
    closer = "]" if reader.take(1) == "[" else ")"
    unit.arguments("[")
    yield from reader.space()
    first = True
    while not (yield from reader.literal((closer,))):
        if not first:
            unit.arguments(", ")
        yield from _value(reader, unit, depth + 1)
        yield from reader.space()
        if (yield from reader.expect(",", closer)) == closer:
            break
        yield from reader.space()
        first = False
    unit.arguments("]")


def _members(reader: Reader, unit: Unit, depth: int) -> Steps[None]:
    reader.take(1)
    unit.arguments("{")
    yield from reader.space()
    first = True
    while not (yield from reader.literal(("}",))):
        if not first:
            unit.arguments(", ")
        if (yield from reader.peek()) not in ("'", '"'):
            raise reader.fault("expected a key in quotes")
        yield from _value(reader, unit, depth + 1)
        yield from reader.space()
        yield from reader.expect(":")
        unit.arguments(": ")
        yield from reader.space()
        yield from _value(reader, unit, depth + 1)
        yield from reader.space()
        if (yield from reader.expect(",", "}")) == "}":
            break
        yield from reader.space()
        first = False
    unit.arguments("}")


def string(reader: Reader, piece: Callable[[str], None]) -> Steps[None]:
    """Consume a string literal in single, double or tripled quotes, giving its text to ``piece`` as it comes."""
    quote = reader.take(1)
    closer = quote
    if (yield from reader.literal((quote * 2,))):
        closer = quote * 3
    elif (yield from reader.literal((quote,))):
        return
    while True:
        character = yield from reader.peek()
        if character == "\\":
            yield from _escape(reader, piece)
        elif character == quote:
            if (yield from reader.literal((closer,))):
                return
            piece(reader.take(1))
        elif not character:
            raise reader.fault("expected the end of a string")
        else:
            piece(reader.take_run(_PLAIN[quote]))


def _escape(reader: Reader, piece: Callable[[str], None]) -> Steps[None]:
    reader.take(1)
    character = yield from reader.peek()
    if not character:
        raise reader.fault("expected the end of a string")
    reader.take(1)
    if character not in _HEX_DIGITS:
        piece(_ESCAPES.get(character, character if character in "\\'\"" else "\\" + character))
        return
    digits = ""
    while len(digits) < _HEX_DIGITS[character]:
        digit = yield from reader.peek()
        if not digit or not _HEX.match(digit):
            raise reader.fault("expected a hexadecimal digit")
        digits += reader.take(1)
    if int(digits, 16) > 0x10FFFF:
        raise Malformed(f"no character has the number {digits}")
    piece(chr(int(digits, 16)))
