"""Owns the pairs of markers that templates put around reasoning, and how a prompt is read by them.

Knows no model and no template. Read next: ``reasoning.py`` and ``channels.py`` (the forms), ``probe_reasoning.py``
(proves which pair a template uses).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from troth.text.channels import CHANNELS
from troth.text.reasoning import REASONING_FORMATS


@dataclass(frozen=True, slots=True)
class Markers:
    """One pair. The text of both is exact."""

    name: str
    open: str
    close: str


MARKERS: Final = (
    *(Markers(form.name, form.opens[0], form.close) for form in REASONING_FORMATS.values()),
    *(Markers(form.name, form.reasoning_tails[0], form.ends[0]) for form in CHANNELS.values() if form.reasoning_tails),
)
"""As templates write them; what else was seen in answers is the formats' own affair."""

_MAX_GAP: Final = 64


def around(text: str, word: str) -> Markers | None:
    """The pair whose markers stand around ``word`` with nothing but white space or a short title between."""
    place = text.find(word)
    if place < 0:
        return None
    before, after = text[:place], text[place + len(word) :]
    found = []
    for markers in MARKERS:
        opened, closed = before.rfind(markers.open.rstrip()), after.find(markers.close)
        if opened < 0 or closed < 0:
            continue
        gap = place - opened - len(markers.open.rstrip())
        if gap <= _MAX_GAP and closed <= _MAX_GAP and markers.close not in before[opened:]:
            found.append((gap, markers))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def open_at_end(text: str) -> Markers | None:
    """The pair whose opening ``text`` ends with, white space aside: an answer to it starts inside the span."""
    end = text.rstrip()
    return next((markers for markers in MARKERS if end.endswith(markers.open.rstrip())), None)


def empty_at_end(text: str) -> Markers | None:
    """The pair that ``text`` ends with open and closed again, or only closed: an answer to it does not reason."""
    end = text.rstrip()
    for markers in MARKERS:
        if end.endswith(markers.close):
            return markers
    return None
