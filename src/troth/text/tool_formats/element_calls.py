"""The body of MiniMax M3's calls: elements named after arguments, every tag behind a namespace mark.

    NS<invoke name="f">NS<city>ParisNS</city>NS<tags>NS<item>aNS</item>NS</tags>NS</invoke>

Elements inside an element are an object, or an array when they are all called ``item``. Text is JSON by its schema.
Refuses to know the markers around. Source: the template of MiniMax M3.
"""

from __future__ import annotations

import re
from typing import Final

from troth.text.tool_formats.coercion import ITEM, escaped, json_text
from troth.text.tool_formats.json_scan import MAX_DEPTH
from troth.text.tool_formats.notation import KEY, ArgumentNotation
from troth.text.tool_formats.reader import Malformed, Reader, Steps
from troth.text.tool_formats.unit import MAX_KEY_CHARACTERS, ArgumentWriter, Unit

MARK: Final = "]<]minimax[>["
CALL_OPEN: Final = f"{MARK}<invoke name="
CALL_CLOSE: Final = f"{MARK}</invoke>"
_OPEN: Final = f"{MARK}<"
_CLOSE: Final = f"{MARK}</"
NOTATION: Final = ArgumentNotation(
    names=r"[^\s<>\"'=\\|]+",
    keys=r"[^<>\s\"'/\\]+",
    open='">\n',
    before_key=_OPEN,
    before_value=">",
    before_text=">",
    end=_OPEN,
    behind=f"/{KEY}>\n",
    close=CALL_CLOSE,
    nests=True,
)
"""How a call is written behind its name. Objects and arrays are read as JSON too."""
_TAG: Final = re.compile(r"[^<>\s\"']")


def read(reader: Reader, unit: Unit, opener: str) -> Steps[None]:
    """Read one unit."""
    name = (yield from reader.word((">",), MAX_KEY_CHARACTERS)).strip().strip("\"'")
    yield from reader.expect(">")
    if not name:
        raise Malformed("expected the name of a tool")
    unit.begin(name)
    writer = ArgumentWriter(unit)
    while True:
        yield from reader.space()
        if (yield from reader.expect(CALL_CLOSE, _OPEN)) == CALL_CLOSE:
            break
        key = yield from _tag(reader)
        writer.raw(key)
        yield from _content(reader, unit, (key,))
    writer.end()


def _tag(reader: Reader) -> Steps[str]:
    name = yield from reader.run(_TAG, MAX_KEY_CHARACTERS)
    yield from reader.expect(">")
    return name


def _content(reader: Reader, unit: Unit, path: tuple[str, ...]) -> Steps[None]:
    """The rest of the element whose opening tag was read, with its closing tag."""
    if len(path) > MAX_DEPTH:
        raise Malformed(f"nested deeper than {MAX_DEPTH}")
    parts: list[str] = []
    found = yield from reader.until((_OPEN, _CLOSE), parts.append)
    text = "".join(parts)
    if not found:
        raise reader.fault("expected the end of an argument")
    if found == _CLOSE:
        unit.arguments(json_text(text, unit.types(*path)))
    elif text.strip():
        raise reader.fault("text and elements in one argument")
    else:
        yield from _elements(reader, unit, path)
    yield from reader.expect((path[-1] if path[-1] != ITEM else "item") + ">")


def _elements(reader: Reader, unit: Unit, path: tuple[str, ...]) -> Steps[None]:
    keys: set[str] = set()
    listed = False
    while True:
        tag = yield from _tag(reader)
        if not keys and not listed:
            listed = tag == "item" and "array" in unit.types(*path)
            unit.arguments("[" if listed else "{")
        else:
            unit.arguments(", ")
        if listed != (tag == "item" and listed) or tag in keys:
            raise Malformed(f"the element {tag!r} cannot stand here")
        if not listed:
            keys.add(tag)
            unit.arguments(f'"{escaped(tag)}": ')
        yield from _content(reader, unit, (*path, ITEM if listed else tag))
        yield from reader.space()
        if (yield from reader.expect(_OPEN, _CLOSE)) == _CLOSE:
            unit.arguments("]" if listed else "}")
            return
