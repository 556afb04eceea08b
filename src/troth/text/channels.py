"""Answers in which every part has a header that says what it is: Harmony (gpt-oss), Functionary, Muse.

    <|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..

Tables only: what begins and ends a header, and what a header means. Read next: ``classifier.py`` (reads them).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

PartKind = Literal["text", "reasoning", "call"]
MAX_HEADER_CHARACTERS: Final = 256

_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelFormat:
    """One way to mark parts."""

    name: str
    starts: tuple[str, ...]
    """Each begins a header anywhere in visible text."""
    header_end: str
    ends: tuple[str, ...]
    """Markers behind a part that are not part of it."""
    prompt_tails: tuple[str, ...]
    """Ends of a prompt that leave the answer inside a header."""
    first_words: tuple[str, ...]
    """How an answer begins that begins with a header; any other answer is text. Empty: every answer does."""
    meaning: Callable[[str], tuple[PartKind, str]]
    """A header's text -> kind, and for a call the tool's name."""
    reasoning_tails: tuple[str, ...] = ()
    """Ends of a prompt that leave the answer inside reasoning."""
    call_headers: tuple[tuple[str, str], ...] = ()
    """What stands before and behind the tool's name in the header of a call: as templates write it, then as models do.
    A grammar of calls is made of them; empty: of this channel there is none."""
    reasoning_header: str = ""
    answer_header: str = ""
    """The header of what is said."""
    next_part: str = ""
    """What follows the end of a part, before the next header."""


def _harmony(header: str) -> tuple[PartKind, str]:
    recipient = _RECIPIENT.search(header)
    if recipient:
        return "call", recipient[1]
    return ("reasoning", "") if "<|channel|>analysis" in header else ("text", "")


def _functionary(header: str) -> tuple[PartKind, str]:
    name = header.strip()
    return ("text", "") if name == "all" else ("call", name)


def _muse(header: str) -> tuple[PartKind, str]:
    recipient = _RECIPIENT.search(header)
    return ("reasoning", "") if recipient and recipient[1] == "self" else ("text", "")


_ALL: Final = (
    ChannelFormat(
        name="harmony",
        starts=("<|start|>", "<|channel|>"),
        header_end="<|message|>",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        prompt_tails=("<|start|>assistant",),
        first_words=("<|start|>", "<|channel|>", " to=", "to="),
        meaning=_harmony,
        reasoning_tails=("<|channel|>analysis<|message|>",),
        reasoning_header="<|channel|>analysis<|message|>",
        call_headers=(
            (" to=functions.", "<|channel|>commentary json<|message|>"),
            ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
        ),
        answer_header="<|channel|>final<|message|>",
        next_part="<|start|>assistant",
    ),
    ChannelFormat(
        name="functionary",
        starts=(">>>",),
        header_end="\n",
        ends=(),
        prompt_tails=(">>>",),
        first_words=(),
        meaning=_functionary,
    ),
    ChannelFormat(
        name="functionary2",
        starts=("<|from|>assistant\n<|recipient|>",),
        header_end="<|content|>",
        ends=("<|stop|>",),
        prompt_tails=("<|recipient|>",),
        first_words=(),
        meaning=_functionary,
    ),
    ChannelFormat(
        name="muse",
        starts=("<|start|>",),
        header_end="<|message|>",
        ends=("<|eom|>", "<|eot|>"),
        prompt_tails=("<|start|>assistant",),
        first_words=("<|start|>", " to=", "to="),
        meaning=_muse,
        reasoning_tails=("to=self<|message|>",),
        reasoning_header=" to=self<|message|>",
        call_headers=((" to=", "<|message|>"),),
        answer_header=" to=user<|message|>",
        next_part="<|start|>assistant",
    ),
)

CHANNELS: Final = MappingProxyType({item.name: item for item in _ALL})
"""Every form by its name. Calls are JSON objects in a part of their own, or of a tool format inside text (Muse)."""
