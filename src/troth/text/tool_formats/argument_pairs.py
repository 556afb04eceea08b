"""Bodies that are a name and pairs of key and value: ``f<arg_key>city</arg_key><arg_value>Paris</arg_value>``.

Sources: templates and replies of GLM 4.5 to 5, Ling 3, Laguna, Spark, LongCat, Hunyuan V3. Values are text; their JSON
comes from the schema (``unit.ArgumentWriter``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from troth.text.tool_formats.notation import ArgumentNotation
from troth.text.tool_formats.reader import Reader, Steps
from troth.text.tool_formats.unit import MAX_KEY_CHARACTERS, ArgumentWriter, Unit

_NAME: Final = re.compile(r"[^\s<>{}\[\]\"'`]")
_MAX_NAME_CHARACTERS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentPairs:
    """The tags around keys and values, and what closes a call (left for the table to consume)."""

    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    separator: str = ""
    """A marker behind the name."""
    json_values: bool = False
    """Strings too are written as JSON."""
    close: str = "</tool_call>"

    @property
    def notation(self) -> ArgumentNotation:
        """How a call is written behind its name."""
        between = f"{self.key[1]}\n{self.value[0]}"
        return ArgumentNotation(
            names=r"[^\s<>{}\[\]\"'`\\]+",
            keys=r"[^\s<>\\]+( [^\s<>\\]+)*",
            open=f"{self.separator}\n",
            before_key=self.key[0],
            before_value=between,
            before_text=None if self.json_values else between,
            end=self.value[1],
            behind="\n",
            close=self.close,
        )

    def __call__(self, reader: Reader, unit: Unit, opener: str) -> Steps[None]:
        """Read one unit."""
        yield from reader.space()
        name = yield from reader.run(_NAME, _MAX_NAME_CHARACTERS)
        if not name:
            raise reader.fault("expected the name of a tool")
        yield from reader.space()
        if self.separator:
            yield from reader.literal((self.separator,))
            yield from reader.space()
        found = yield from reader.expect(self.key[0], self.close)
        unit.begin(name)
        writer = ArgumentWriter(unit, json_values=self.json_values)
        while found != self.close:
            key = (yield from reader.word((self.key[1],), MAX_KEY_CHARACTERS)).strip()
            yield from reader.expect(self.key[1])
            yield from reader.space()
            yield from reader.literal((self.value[0],))
            writer.key(key)
            if not (yield from reader.until((self.value[1],), writer.text)):
                raise reader.fault(f"expected {self.value[1]!r}")
            writer.end_value()
            yield from reader.space()
            found = yield from reader.expect(self.key[0], self.close)
        writer.end()
