"""Formats that no module describes: markers taken from what a template writes, or from what a config declares.

Both give a candidate only, in words that can be handed on (``contracts/tools.CallForm``); whoever wants to use one
proves it by reading back what the template renders (``text/template_probe.py``). Knows no template engine. Read next:
``format.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from troth.contracts.tools import CallForm
from troth.text.tool_formats.format import ToolFormat
from troth.text.tool_formats.json_calls import JsonCalls
from troth.text.tool_formats.json_scan import json_value
from troth.text.tool_formats.reader import Reader, Steps
from troth.text.tool_formats.unit import Unit

MAX_NAME_CHARACTERS: Final = 256
MAX_MARKER_CHARACTERS: Final = 128

_OPENER: Final = re.compile(r"[^\s{\"']+")
_MARK: Final = re.compile(r"[<>\[\]|]")


@dataclass(frozen=True, slots=True)
class DerivedCalls:
    """A name and a JSON object between words that are always the same; white space between them is free."""

    before_name: tuple[str, ...]
    """Words between the opening marker and the name."""
    between: tuple[str, ...]
    """Words between the name and the object."""
    after: tuple[str, ...]
    """Words behind the object, the last of them the closing marker."""

    def __call__(self, reader: Reader, unit: Unit, opener: str) -> Steps[None]:
        """Read one unit."""
        yield from _words(reader, self.before_name)
        yield from reader.space()
        ends = self.between[:1] or ("{", "\n", " ")
        name = (yield from reader.word(ends, MAX_NAME_CHARACTERS)).strip()
        yield from _words(reader, self.between)
        yield from reader.space()
        if not name or (yield from reader.peek()) != "{":
            raise reader.fault("expected a name and the arguments as a JSON object")
        unit.begin(name)
        yield from json_value(reader, unit.arguments)
        yield from _words(reader, self.after)


def _words(reader: Reader, words: tuple[str, ...]) -> Steps[None]:
    for word in words:
        yield from reader.space()
        yield from reader.expect(word)


def format_of(form: CallForm, name: str) -> ToolFormat:
    """What reads calls of a form."""
    if not form.named:
        body = JsonCalls(argument_keys=("arguments", "parameters"))
        return ToolFormat(name=name, opens=form.opens, body=body, closes=form.closes)
    named = DerivedCalls(before_name=form.before_name, between=form.between, after=form.after)
    return ToolFormat(name=name, opens=form.opens, body=named, resumes=form.after[-1:])


def derived_form(with_call: str, with_text: str, name: str, arguments: Mapping[str, Any]) -> CallForm | None:
    """The form of a template's calls, from two renders that differ in the last message.

    Args:
        with_call: The assistant calls ``name`` with ``arguments`` and says nothing.
        with_text: The assistant says something that begins and ends with a letter, and calls nothing.
        name: A word that is nowhere else in the conversation.
        arguments: The arguments, a JSON object that is not empty.

    Returns:
        A candidate; None when the call is not written as a marker, a name, a JSON object and perhaps another marker.
    """
    start = _num_common(with_call, with_text)
    end = len(with_call) - _num_common(with_call[start:][::-1], with_text[start:][::-1])
    written = with_call[start:end]
    before, found, behind = written.partition(name)
    opener = _OPENER.match(before)
    if not found or not opener or not _MARK.search(opener[0]) or name in behind:
        return None
    span = _object_in(behind, arguments)
    if span is None:
        return None
    form = CallForm(
        opens=(opener[0],),
        named=True,
        before_name=tuple(before[opener.end() :].split()),
        between=tuple(behind[: span[0]].split()),
        after=tuple(behind[span[1] :].split()),
    )
    words = (opener[0], *form.before_name, *form.between, *form.after)
    return None if any(len(word) > MAX_MARKER_CHARACTERS for word in words) else form


def declared_form(response_template: Mapping[str, Any]) -> CallForm | None:
    """The form that a tokenizer config's ``response_template`` (transformers 5, version 1) declares for calls.

    Returns:
        A form when calls stand as JSON between two literal markers; None for any other declaration, as patterns are
        not run.
    """
    fields = response_template.get("fields")
    calls = fields.get("tool_calls") if isinstance(fields, Mapping) else None
    if response_template.get("version", 1) != 1 or not isinstance(calls, Mapping):
        return None
    transform = calls.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    opens, closes = _literals(calls.get("open")), _literals(calls.get("close"))
    if (
        calls.get("content") != "json"
        or calls.get("content_args")
        or function != "{content}"
        or not opens
        or not closes
    ):
        return None
    return CallForm(opens=opens, closes=closes)


def _literals(value: Any) -> tuple[str, ...]:
    """One marker or several, without the white space around, which is free anyway."""
    items = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    found = tuple(item.strip() for item in items if isinstance(item, str))
    return found if all(0 < len(item) <= MAX_MARKER_CHARACTERS for item in found) else ()


def _num_common(one: str, other: str) -> int:
    """Characters at the start that two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _object_in(text: str, wanted: Mapping[str, Any]) -> tuple[int, int] | None:
    """Where ``text`` holds the JSON object, and where it ends."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if value == wanted:
            return match.start(), end
    return None
