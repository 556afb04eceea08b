"""Bodies that are a name in the open and the arguments as one JSON object: ``f[ARGS]{"city":"Paris"}``.

Sources: templates and replies of Mistral (Tekken v11 and v13), Kimi K2, Solar Open. Refuses to know markers: those are
in the table of each format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from troth.text.tool_formats.json_calls import JsonCalls
from troth.text.tool_formats.json_scan import json_value
from troth.text.tool_formats.reader import Malformed, Reader, Steps
from troth.text.tool_formats.unit import Unit

MAX_NAME_CHARACTERS: Final = 256
_NOT_A_NAME: Final = re.compile(r"[\s<\[\]{}\"']")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedJson:
    """What stands around the name and the object."""

    after_name: tuple[str, ...]
    """Markers that end the name; the last one consumed must be followed by the object."""
    id_marker: str = ""
    """Where the name may end and an id begin, before one of ``after_name``."""
    id_first: str = ""
    """A marker between an id, which comes first, and the name."""
    object_ends_name: bool = False
    """The name may end where the object begins, without a marker."""
    prefixes: tuple[str, ...] = ()
    """Words before the name that are not part of it."""
    name_is_id: bool = False
    """``prefix.NAME:INDEX`` as a whole is the call's id (Kimi)."""
    array: JsonCalls | None = None
    """What stands there instead when it begins with a bracket."""

    def __call__(self, reader: Reader, unit: Unit, opener: str) -> Steps[None]:
        """Read one unit."""
        yield from reader.space()
        if self.array and (yield from reader.peek()) == "[":
            yield from self.array(reader, unit, opener)
            return
        call_id = None
        if self.id_first:
            call_id = (yield from reader.word((self.id_first,), MAX_NAME_CHARACTERS)).strip() or None
            yield from reader.expect(self.id_first)
        ends = (*self.after_name, *((self.id_marker,) if self.id_marker else ()), *("{" * self.object_ends_name))
        written = (yield from reader.word(ends, MAX_NAME_CHARACTERS)).strip()
        if self.id_marker and (yield from reader.literal((self.id_marker,))):
            call_id = (yield from reader.word(self.after_name, MAX_NAME_CHARACTERS)).strip() or None
        yield from reader.literal(self.after_name)
        name = written
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        if self.name_is_id:
            call_id = written or None
            name, colon, index = name.rpartition(":")
            if not colon or not index.isdecimal():
                name = name + colon + index
        if not name or _NOT_A_NAME.search(name):
            raise Malformed("expected the name of a tool")
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            raise reader.fault("expected the arguments as a JSON object")
        unit.begin(name, call_id)
        yield from json_value(reader, unit.arguments)
