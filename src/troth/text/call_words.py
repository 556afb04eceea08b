"""Finds the words around known calls in what a template wrote of them.

A call is a name and its arguments: one JSON object, or in a notation. Knows no template engine and makes no grammar.
Read next: ``probe_tools.py`` (renders the calls), ``call_pattern.py`` (what is made of the words).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from troth.text.message_form import short_call_id
from troth.text.probe_trial import CALL_IDS, FIRST, SECOND, Sample
from troth.text.tool_formats.notation import CALL_ID, INDEX, ArgumentNotation


@dataclass(frozen=True, slots=True)
class Words:
    """What stands around the names and arguments of known calls."""

    before: str
    between: str
    after: str
    name_last: bool = False
    joint: str = ""


def without_ids(reply: str) -> str:
    """A reply in which ids, and numbers of calls that stand behind names, are only places."""
    for call_id in CALL_IDS:
        # As it was given, as it was made short for the template, and as some templates cut it themselves.
        for written in (call_id, short_call_id(call_id), call_id[-9:]):
            reply = reply.replace(written, CALL_ID)
    for sample in (FIRST, SECOND):
        reply = re.sub(rf"({sample.name}):\d+(?=<)", rf"\1:{INDEX}", reply)
    return reply


def words_of(replies: Sequence[str], notation: ArgumentNotation | None) -> Words | None:
    """The words of replies that hold the first sample, the second, and perhaps both."""
    pieces = _json_pieces if notation is None else partial(_notated_pieces, notation)
    first, second = pieces(replies[0], FIRST), pieces(replies[1], SECOND)
    if first is None or first != second:
        return None
    if len(replies) < 3 or first.name_last or (both := pieces(replies[2], FIRST)) is None:
        return first
    # In the reply with both calls, what follows the first is words, the second, and the same end.
    rest = pieces(both.after, SECOND)
    if rest is None or both.before != first.before or replace(rest, before="") != replace(first, before=""):
        return first
    return replace(first, joint=rest.before)


def _json_pieces(reply: str, sample: Sample) -> Words | None:
    """The words around a call whose arguments are one JSON object."""
    span, place = json_object(reply, sample.arguments), reply.find(sample.name)
    if span is None or place < 0:
        return None
    start, end = span
    name_end = place + len(sample.name)
    if place < start and sample.name in reply[name_end:start]:
        return None
    if place < start:
        return Words(reply[:place], reply[name_end:start], reply[end:])
    return Words(reply[:start], reply[end:place], reply[name_end:], name_last=True)


def _notated_pieces(notation: ArgumentNotation, reply: str, sample: Sample) -> Words | None:
    """The words around a call in a notation, which has those between the name and its own end."""
    for match in re.finditer(re.escape(sample.name), reply):
        rest = reply[match.end() :]
        begun = re.match(_loose_pattern(notation.open + notation.before_key), rest)
        end = rest.find(notation.close, rest.find(sample.text) + len(sample.text))
        if begun and end >= 0:
            return Words(reply[: match.start()], "", rest[end + len(notation.close) :])
    return None


def _loose_pattern(words: str) -> str:
    """A regular expression of the words of a notation."""
    return "".join({"\n": "\n?", INDEX: "[0-9]+"}.get(character) or re.escape(character) for character in words)


def json_object(text: str, wanted: dict[str, Any]) -> tuple[int, int] | None:
    """Where the first JSON object in a text that is the wanted one stands."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            value, end = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if value == wanted:
            return match.start(), end
    return None
