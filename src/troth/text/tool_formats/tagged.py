"""The body behind ``<tool_call>``: a JSON object, tags, or pairs, told apart by how it begins.

One tag, three contents: Hermes and Qwen3 write JSON in it, Qwen3-Coder tags, GLM pairs. A model that was trained on one
slips into another; the contents cannot be confused. Refuses to know the markers around. Read next: ``json_calls.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from troth.text.tool_formats.argument_pairs import ArgumentPairs
from troth.text.tool_formats.json_calls import JsonCalls
from troth.text.tool_formats.reader import Reader, Steps
from troth.text.tool_formats.unit import Unit
from troth.text.tool_formats.xml_calls import XmlCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged:
    """What may stand in the tag: objects, and tags or pairs or both. The body consumes the closing tag itself."""

    close: str
    objects: JsonCalls
    tags: XmlCalls | None = None
    pairs: ArgumentPairs | None = None

    def __call__(self, reader: Reader, unit: Unit, opener: str) -> Steps[None]:
        """Read one unit."""
        if self.tags and opener in self.tags.call_open:
            yield from self.tags(reader, unit, opener)
            return
        yield from reader.space()
        first = yield from reader.peek()
        if first in ("{", "["):
            yield from self.objects(reader, unit, opener)
        elif self.tags and (self.pairs is None or first == "<"):
            yield from self.tags(reader, unit, "")
        else:
            assert self.pairs is not None
            yield from self.pairs(reader, unit, opener)
            return
        yield from reader.space()
        yield from reader.expect(self.close)
