"""The body of Gemma's calls: ``call:f{city:<|"|>Paris<|"|>,n:1,box:{x:1}}`` (Gemma 4), with ``<escape>`` in Gemma 3.

Bare words are JSON where they can be and text otherwise; text between the special quotes is taken as it is, nothing in
it is an escape. Refuses to know the markers around. Sources: the templates of Gemma 4 and FunctionGemma.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from troth.text.tool_formats.coercion import ANY, Types, escaped, json_text
from troth.text.tool_formats.json_scan import MAX_DEPTH
from troth.text.tool_formats.notation import ArgumentNotation, Literals, Quote
from troth.text.tool_formats.python_calls import string
from troth.text.tool_formats.reader import Malformed, Reader, Steps
from troth.text.tool_formats.unit import MAX_KEY_CHARACTERS, ArgumentWriter, Unit

_NAME: Final = re.compile(r"[^\s{}\[\]<>()\"',]")
_KEY: Final = re.compile(r"[^\s:{}\[\]<>()\"',]")
_WRITTEN_KEY: Final = r"[^\s:{}\[\]<>()\"',\\]+"
_BARE: Final = re.compile(r"[^,{}\[\]<>\"']")
_MAX_NAME_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaCalls:
    """``quote`` both opens and closes a text."""

    quote: str
    quoted_values: bool = False
    """Values that are no texts are written between the quotes too (FunctionGemma)."""
    sorted_keys: bool = False
    """Keys come in alphabetical order (Gemma 4)."""

    @property
    def notation(self) -> ArgumentNotation:
        """How a call is written behind its name."""
        return ArgumentNotation(
            names=r"[^\s{}\[\]<>()\"',\\]+",
            keys=_WRITTEN_KEY,
            open="{",
            before_key="",
            before_value=":",
            before_text=None,
            separator=",",
            close="}",
            literals=Literals(
                quotes=(Quote(mark=self.quote),), bare_keys=_WRITTEN_KEY, space=False, sorted_keys=self.sorted_keys
            ),
            quoted_values=self.quoted_values,
        )

    def __call__(self, reader: Reader, unit: Unit, opener: str) -> Steps[None]:
        """Read one unit."""
        yield from reader.space()
        yield from reader.expect("call:")
        name = yield from reader.run(_NAME, _MAX_NAME_CHARACTERS)
        yield from reader.space()
        yield from reader.expect("{")
        if not name:
            raise Malformed("expected the name of a tool")
        unit.begin(name)
        writer = ArgumentWriter(unit)
        yield from reader.space()
        if not (yield from reader.literal(("}",))):
            while True:
                key = yield from self._key(reader)
                writer.raw(key)
                yield from self._value(reader, unit, unit.types(key), 0)
                yield from reader.space()
                if (yield from reader.expect(",", "}")) == "}":
                    break
                yield from reader.space()
        writer.end()

    def _key(self, reader: Reader) -> Steps[str]:
        """A key, quoted or not, with the colon behind it."""
        parts: list[str] = []
        if (yield from reader.literal((self.quote,))):
            yield from reader.until((self.quote,), parts.append)
        elif (yield from reader.peek()) in ("'", '"'):
            yield from string(reader, parts.append)
        else:
            parts.append((yield from reader.run(_KEY, MAX_KEY_CHARACTERS)))
        yield from reader.space()
        yield from reader.expect(":")
        yield from reader.space()
        return "".join(parts)

    def _value(self, reader: Reader, unit: Unit, types: Types, depth: int) -> Steps[None]:
        if depth > MAX_DEPTH:
            raise Malformed(f"nested deeper than {MAX_DEPTH}")
        first = yield from reader.peek()
        if first == "{":
            yield from self._members(reader, unit, depth)
        elif first == "[":
            yield from self._items(reader, unit, depth)
        elif (yield from reader.literal((self.quote,))):
            if self.quoted_values and "string" not in types:
                parts: list[str] = []
                if not (yield from reader.until((self.quote,), parts.append)):
                    raise reader.fault("expected the end of a value")
                unit.arguments(json_text("".join(parts), types))
                return
            unit.arguments('"')
            if not (yield from reader.until((self.quote,), lambda text: unit.arguments(escaped(text)))):
                raise reader.fault("expected the end of a text")
            unit.arguments('"')
        elif first in ("'", '"'):
            unit.arguments('"')
            yield from string(reader, lambda text: unit.arguments(escaped(text)))
            unit.arguments('"')
        else:
            word = (yield from reader.run(_BARE, 1 << 16)).strip()
            if not word:
                raise reader.fault("expected a value", (self.quote,))
            unit.arguments(json_text(word, types))

    def _items(self, reader: Reader, unit: Unit, depth: int) -> Steps[None]:
        reader.take(1)
        unit.arguments("[")
        yield from reader.space()
        if not (yield from reader.literal(("]",))):
            while True:
                yield from self._value(reader, unit, ANY, depth + 1)
                yield from reader.space()
                if (yield from reader.expect(",", "]")) == "]":
                    break
                unit.arguments(", ")
                yield from reader.space()
        unit.arguments("]")

    def _members(self, reader: Reader, unit: Unit, depth: int) -> Steps[None]:
        reader.take(1)
        unit.arguments("{")
        yield from reader.space()
        if not (yield from reader.literal(("}",))):
            while True:
                key = yield from self._key(reader)
                unit.arguments(f'"{escaped(key)}": ')
                yield from self._value(reader, unit, ANY, depth + 1)
                yield from reader.space()
                if (yield from reader.expect(",", "}")) == "}":
                    break
                unit.arguments(", ")
                yield from reader.space()
        unit.arguments("}")
