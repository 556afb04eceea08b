"""Bodies made of tags, one per argument: ``<function=f><parameter=city>Paris</parameter></function>`` and its kin.

Sources: templates and replies of Qwen3-Coder and Qwen3.5, Nemotron 3, Seed-OSS, Step 3.5, MiniMax M2, MiniCPM 5,
DeepSeek V3.2 and V4, Kimi K3, Muse. Values are text; their JSON comes from the schema (``unit.ArgumentWriter``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from troth.text.tool_formats.coercion import ANY, Types
from troth.text.tool_formats.json_scan import json_value
from troth.text.tool_formats.notation import INDEX, ArgumentNotation
from troth.text.tool_formats.reader import Malformed, Reader, Steps
from troth.text.tool_formats.unit import ArgumentWriter, Unit

_DATA_OPEN: Final = "<![CDATA["
_DATA_CLOSE: Final = "]]>"
_MAX_TAG_CHARACTERS: Final = 512
_WRITTEN: Final = r"[^\s<>\"'=\\|]+( [^\s<>\"'=\\|]+)*"
_QUOTED: Final = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))(.*)""", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlCalls:
    """The tags. An opening tag is its ``*_open``, the name or key, attributes, ``tag_end``."""

    call_open: tuple[str, ...]
    call_close: str
    argument_open: tuple[str, ...]
    argument_close: str
    tag_end: str = ">"
    quoted: bool = True
    """Names stand in quotes (or may); otherwise everything up to ``tag_end`` is the name."""
    paired_newlines: bool = False
    """A value between two newlines is what stands between them."""
    string_attribute: str = ""
    """An attribute that makes a value text; any other value is JSON where it can be (DSML, Kimi K3)."""
    character_data: bool = False
    """A value may be wrapped in ``<![CDATA[..]]>``, and then holds anything but its end."""
    json_body: bool = False
    """A call may hold one JSON object instead of tags."""
    number_attribute: str = ""
    """An attribute of a call that counts the calls of an answer (Kimi K3)."""
    other_attribute: str = ""
    """The attribute of a value that is no text, where a text has ``string_attribute``."""

    @property
    def notation(self) -> ArgumentNotation:
        """How a call is written behind its name."""
        quote = '"' if self.quoted else ""
        number = f' {self.number_attribute}="{INDEX}"' if self.number_attribute else ""
        text, other = (f" {one}" if one else "" for one in (self.string_attribute, self.other_attribute))
        return ArgumentNotation(
            names=_WRITTEN,
            keys=_WRITTEN,
            open=f"{quote}{number}{self.tag_end}\n",
            before_key=f"{self.argument_open[0]}{quote}",
            before_value=f"{quote}{other}{self.tag_end}",
            before_text=f"{quote}{text}{self.tag_end}",
            end=self.argument_close,
            behind="\n",
            close=self.call_close,
            padded=self.paired_newlines,
            tells_texts=bool(self.string_attribute),
            never_first=_DATA_OPEN if self.character_data else "",
        )

    def __call__(self, reader: Reader, unit: Unit, opener: str) -> Steps[None]:
        """Read one unit."""
        if opener not in self.call_open:
            yield from reader.space()
            yield from reader.expect(*self.call_open)
        name, _ = yield from self._tag(reader)
        yield from reader.space()
        if self.json_body and (yield from reader.peek()) == "{":
            unit.begin(name)
            yield from json_value(reader, unit.arguments)
            yield from reader.space()
            yield from reader.expect(self.call_close)
            return
        found = yield from reader.expect(*self.argument_open, self.call_close)
        unit.begin(name)
        writer = ArgumentWriter(unit, paired_newlines=self.paired_newlines)
        while found != self.call_close:
            key, attributes = yield from self._tag(reader)
            types, json_values = self._kind(attributes)
            writer.key(key, types, json_values=json_values)
            ends = (self.argument_close,)
            if self.character_data and (yield from reader.literal((_DATA_OPEN,))):
                ends = (_DATA_CLOSE + self.argument_close,)
            if not (yield from reader.until(ends, writer.text)):
                raise reader.fault("expected the end of an argument")
            writer.end_value()
            yield from reader.space()
            found = yield from reader.expect(*self.argument_open, self.call_close)
        writer.end()

    def _tag(self, reader: Reader) -> Steps[tuple[str, str]]:
        """Name and attributes of an opening tag whose beginning was consumed."""
        inside = yield from reader.word((self.tag_end,), _MAX_TAG_CHARACTERS)
        yield from reader.expect(self.tag_end)
        if not self.quoted:
            name, attributes = inside.strip(), ""
        else:
            match = _QUOTED.fullmatch(inside)
            if not match:
                raise Malformed("expected a name")
            name, attributes = match[1] or match[2] or match[3] or "", match[4]
        if not name or "<" in name:
            raise Malformed("expected a name")
        return name, attributes

    def _kind(self, attributes: str) -> tuple[Types | None, bool]:
        """Types by the tag's own attribute where the format has one, else by the schema."""
        if not self.string_attribute:
            return None, False
        if self.string_attribute in attributes:
            return frozenset({"string"}), False
        return ANY, True
