"""The body of DeepSeek's calls: ``f<｜tool▁sep｜>{..}`` (V3.1), or the word function, the separator, the name, and the
object in a fence (V3, R1).

Refuses to know the markers around a call. Source: the templates of DeepSeek V3, R1 and V3.1.
"""

from __future__ import annotations

from typing import Final

from troth.text.tool_formats.json_scan import json_value
from troth.text.tool_formats.named_json import MAX_NAME_CHARACTERS
from troth.text.tool_formats.reader import Malformed, Reader, Steps
from troth.text.tool_formats.unit import Unit
from troth.text.tool_formats.xml_calls import XmlCalls

SEPARATORS: Final = ("<｜tool▁sep｜>", "<｜tool_sep｜>")
_FENCES: Final = ("```json", "```")


def read(reader: Reader, unit: Unit, opener: str) -> Steps[None]:
    """Read one unit."""
    yield from reader.space()
    name = (yield from reader.word(SEPARATORS, MAX_NAME_CHARACTERS)).strip()
    yield from reader.expect(*SEPARATORS)
    yield from reader.space()
    if name == "function" and (yield from reader.peek()) != "{":
        name = (yield from reader.word(("\n", "`", "{"), MAX_NAME_CHARACTERS)).strip()
    if not name or "<" in name:
        raise Malformed("expected the name of a tool")
    yield from reader.space()
    fence = yield from reader.literal(_FENCES)
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        raise reader.fault("expected the arguments as a JSON object")
    unit.begin(name)
    yield from json_value(reader, unit.arguments)
    if fence:
        yield from reader.space()
        yield from reader.expect("```")


STEP: Final = XmlCalls(
    call_open=("<steptml:invoke name=",),
    call_close="</steptml:invoke>",
    argument_open=("<steptml:parameter name=",),
    argument_close="</steptml:parameter>",
)


def read_step(reader: Reader, unit: Unit, opener: str) -> Steps[None]:
    """Read one unit of Step 3: the word function, the separator, then tags."""
    yield from reader.space()
    yield from reader.word(SEPARATORS, MAX_NAME_CHARACTERS)
    yield from reader.expect(*SEPARATORS)
    yield from STEP(reader, unit, "")
