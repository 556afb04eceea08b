"""Owns one span of calls while it is read: names, ids and the JSON text of arguments, in the order they arrive.

Knows no marker. What a format's body parser finds it tells the unit; what becomes of it is decided elsewhere
(``text/tool_calls.py``). Text values become JSON here, by the type their schema declares. Read next: ``coercion.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from troth.contracts.tools import ToolErrorReason
from troth.text.tool_formats.coercion import ANY, Types, escaped, json_text
from troth.text.tool_formats.reader import Malformed, NoCall

MAX_KEY_CHARACTERS: Final = 128
MAX_ARGUMENTS: Final = 256


class Declarations(Protocol):
    """What a unit needs to know of the advertised tools."""

    def __contains__(self, name: object) -> bool:
        """Whether a tool of this name is advertised."""

    def types(self, name: str, path: tuple[str, ...]) -> Types:
        """JSON types that the value at ``path`` in the arguments of tool ``name`` may have; ``ANY`` when nothing is
        known. A path is keys, ``ITEM`` for any place in an array.
        """


@dataclass(slots=True)
class Proposal:
    """One call as the model wrote it."""

    name: str
    call_id: str | None = None
    parts: list[str] = field(default_factory=list)
    fault: tuple[ToolErrorReason, str] | None = None
    """Reason and message when the writer of arguments already knows that they are no good."""

    @property
    def arguments(self) -> str:
        """JSON text, if the model wrote any."""
        return "".join(self.parts)


class Unit:
    """The calls of one span."""

    def __init__(self, declarations: Declarations, *, soft: bool = False) -> None:
        """``soft``: only a call of an advertised tool is one at all; for forms that ordinary text has too."""
        self._declarations = declarations
        self._soft = soft
        self.listener: Callable[[int, str], None] | None = None
        """Hears of each call as it grows: its place in the unit and the new arguments (empty first)."""
        self.proposals: list[Proposal] = []
        """Calls that got as far as a name; while there is none, markup is only text about markup."""

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call of tool ``name`` begins. NoCall where such text is none."""
        if self._soft and name not in self._declarations:
            raise NoCall(f"no tool is called {name[:100]!r}")
        self.proposals.append(Proposal(name, call_id))
        if self.listener:
            self.listener(len(self.proposals) - 1, "")

    def arguments(self, text: str) -> None:
        """More JSON text of the current call's arguments, exactly as it will stand."""
        if text:
            self.proposals[-1].parts.append(text)
            if self.listener:
                self.listener(len(self.proposals) - 1, text)

    def types(self, *path: str) -> Types:
        """What the current tool's schema lets a value be; ``path`` as in ``Declarations.types``."""
        return self._declarations.types(self.proposals[-1].name, path)


class ArgumentWriter:
    """Writes the arguments of a call whose values come as text, key by key, into one JSON object.

    A value declared a string is passed on while it arrives; any other is kept until it is whole, because its JSON is
    not known before.
    """

    def __init__(self, unit: Unit, *, paired_newlines: bool = False, json_values: bool = False) -> None:
        """``paired_newlines``: a value between two newlines is what stands between them. ``json_values``: every value
        is JSON where it can be, strings with their quotes.
        """
        self._unit = unit
        self._paired = paired_newlines
        self._json_values = json_values
        self._keys: set[str] = set()
        self._value: list[str] = []
        self._types: Types = ANY
        self._streams = False
        self._value_is_json = json_values
        self._at_start = True
        self._newline = False  # the value began with one
        self._held = ""

    def key(self, key: str, types: Types | None = None, *, json_values: bool | None = None) -> None:
        """Begin the value of ``key``. ``types`` overrules the schema. Malformed on a key that cannot be one."""
        if not key or len(key) > MAX_KEY_CHARACTERS or not key.isprintable():
            raise Malformed(f"an argument cannot be called {key[:40]!r}")
        if len(self._keys) == MAX_ARGUMENTS:
            raise Malformed(f"more than {MAX_ARGUMENTS} arguments")
        if key in self._keys:
            self._unit.proposals[-1].fault = ("duplicate_key", f"the argument {key!r} is given twice")
        self._unit.arguments((", " if self._keys else "{") + f'"{escaped(key)}": ')
        self._keys.add(key)
        self._types = types if types is not None else self._unit.types(key)
        self._value_is_json = self._json_values if json_values is None else json_values
        self._streams = self._types == {"string"} and not self._value_is_json
        self._value, self._at_start, self._newline, self._held = [], True, False, ""
        if self._streams:
            self._unit.arguments('"')

    def text(self, text: str) -> None:
        """More of the value."""
        if self._at_start and text:
            self._at_start = False
            if self._paired and text.startswith("\n"):
                self._newline, text = True, text[1:]
        if self._newline and text:
            text, self._held = self._held + text, ""
            if text.endswith("\n"):
                text, self._held = text[:-1], "\n"
        if self._streams:
            self._unit.arguments(escaped(text))
        else:
            self._value.append(text)

    def end_value(self) -> None:
        """The value is whole."""
        if self._streams:
            self._unit.arguments('"')
        else:
            self._unit.arguments(json_text("".join(self._value), self._types, json_values=self._value_is_json))

    def raw(self, key: str) -> None:
        """Begin the value of ``key``, whose JSON the caller gives to the unit itself."""
        self.key(key, ANY)

    def end(self) -> None:
        """The object is whole."""
        self._unit.arguments("}" if self._keys else "{}")
