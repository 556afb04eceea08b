"""Bodies that are JSON objects naming the tool: ``{"name": .., "arguments": {..}}``, one, several, or in an array.

Sources: templates and replies of Hermes 2 Pro, Qwen 2.5 and 3, Granite 3, Mistral 7B v0.3, Llama 3, Phi-4 mini,
Command R7B, InternLM 2, MiniMax M1, Apertus. Refuses to know markers: those are in the table of each format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from troth.text.tool_formats.json_scan import decoded, json_key, json_value
from troth.text.tool_formats.reader import Malformed, Reader, Steps
from troth.text.tool_formats.unit import Unit

_TOLERATED: Final = frozenset({"type"})


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """How the objects are laid out."""

    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments",)
    id_keys: tuple[str, ...] = ("id",)
    array: bool = True
    """An array of calls may stand where one call may."""
    separators: tuple[str, ...] = ()
    """Several objects may follow each other with one of these between."""
    spaced: bool = False
    """Several objects may follow each other with white space between."""
    keyed: bool = False
    """The tool's name is the only key and its arguments the value."""

    def __call__(self, reader: Reader, unit: Unit, opener: str) -> Steps[None]:
        """Read one unit."""
        yield from reader.space()
        first = yield from reader.peek()
        if first == "[" and self.array:
            reader.take(1)
            yield from self._several(reader, unit)
        else:
            yield from self._call(reader, unit)
            while (self.separators or self.spaced) and (yield from self._another(reader)):
                yield from self._call(reader, unit)

    def _several(self, reader: Reader, unit: Unit) -> Steps[None]:
        while True:
            yield from reader.space()
            yield from self._call(reader, unit)
            yield from reader.space()
            if (yield from reader.expect(",", "]")) == "]":
                return

    def _another(self, reader: Reader) -> Steps[bool]:
        if self.spaced:
            yield from reader.space()
            return (yield from reader.peek()) == "{"
        found = yield from reader.literal(self.separators)
        if found:
            yield from reader.space()
        return bool(found)

    def _call(self, reader: Reader, unit: Unit) -> Steps[None]:
        yield from reader.expect("{")
        yield from reader.space()
        call = _Call(unit)
        while True:
            key = yield from json_key(reader)
            if self.keyed:
                call.take_name(key)
                yield from self._arguments(reader, call)
            elif key in self.name_keys:
                name = decoded((yield from _whole(reader)))
                if not isinstance(name, str) or not name:
                    raise Malformed("the name of a call must be a string")
                call.take_name(name)
            elif key in self.argument_keys:
                yield from self._arguments(reader, call)
            elif key in self.id_keys or key in _TOLERATED:
                value = decoded((yield from _whole(reader)))
                if key in self.id_keys:
                    call.call_id = value if isinstance(value, str) else str(value)
            else:
                raise Malformed(f"the key {key[:40]!r} does not belong to a call")
            yield from reader.space()
            if (yield from reader.expect(",", "}")) == "}":
                break
            yield from reader.space()
        call.end()

    def _arguments(self, reader: Reader, call: _Call) -> Steps[None]:
        call.begin_arguments()
        if (yield from reader.peek()) == '"':
            # Some models write the object as a string that holds it.
            text = decoded((yield from _whole(reader)))
            call.piece(str(text))
        else:
            yield from json_value(reader, call.piece)


class _Call:
    """One object while it is read; arguments that come before the name wait for it."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._name: str | None = None
        self._waiting: list[str] = []
        self._has_arguments = False
        self.call_id: str | None = None

    def take_name(self, name: str) -> None:
        if self._name is not None:
            raise Malformed("a call with two names")
        self._name = name
        self._unit.begin(name, self.call_id)
        self._unit.arguments("".join(self._waiting))

    def begin_arguments(self) -> None:
        if self._has_arguments:
            raise Malformed("a call with arguments given twice")
        self._has_arguments = True

    @property
    def piece(self) -> Callable[[str], None]:
        return self._waiting.append if self._name is None else self._unit.arguments

    def end(self) -> None:
        if self._name is None or not self._has_arguments:
            raise Malformed("a call needs a name and arguments")
        self._unit.proposals[-1].call_id = self.call_id


def _whole(reader: Reader) -> Steps[str]:
    parts: list[str] = []
    yield from json_value(reader, parts.append)
    return "".join(parts)
