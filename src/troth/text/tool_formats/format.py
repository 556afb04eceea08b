"""Owns the shape of a wire format: the table that says where calls begin and end, and what reads them.

Knows no format by itself and no tool. Read next: ``__init__.py`` (the registry), ``unit.py`` (what a body parser
reports to), then any format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from troth.text.tool_formats.notation import ArgumentNotation
from troth.text.tool_formats.reader import Reader, Steps
from troth.text.tool_formats.unit import Unit

Body = Callable[[Reader, Unit, str], Steps[None]]
"""Reads one unit: from behind its opening marker (given) to where its ``closes`` must come. Raises Malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write calls. Markers are exact text; white space between them is free."""

    name: str
    opens: tuple[str, ...]
    """Each begins a unit (one call, or several that are accepted together) anywhere in visible text."""
    body: Body
    closes: tuple[str, ...] = ()
    """One of them ends a unit; empty when the body tells its own end."""
    sections: tuple[str, ...] = ()
    """A wrapper that may stand before the first unit."""
    section_ends: tuple[str, ...] = ()
    """What may stand after the last unit, wrapper or stray closing marker."""
    bare: tuple[str, ...] = ()
    """A unit without an opening marker begins with one of these, if the visible answer does, and is all of it."""
    soft: tuple[str, ...] = ()
    """Openers that ordinary text has too: what follows is a call only if it names an advertised tool."""
    lone: bool = False
    """Units are read without their wrapper too."""
    resumes: tuple[str, ...] = ()
    """Where a broken unit ends when there are no ``closes``: up to one of these nothing is taken for a call."""
    inner: tuple[str, ...] = ()
    """Markers inside a call; where a vocabulary has control tokens for them, they mean something here."""
    frames: tuple[str, ...] = ()
    """Markers around visible text that are not part of it."""
    notation: ArgumentNotation | None = None
    """How a call is written behind its name, where it is not a JSON object: what grammars of calls are made of."""
    id_style: Literal["call", "nine"] = "call"
    """Ids made for calls that have none: ``call_`` and 24 hex digits, or nine letters and digits (Mistral)."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything by which text of this format can be recognised, for evidence; never proof by itself."""
        return (*self.sections, *self.opens, *self.closes, *self.section_ends)

    @property
    def entries(self) -> tuple[str, ...]:
        """Markers that begin a call in visible text."""
        return (*self.sections, *self.opens) if self.lone or not self.sections else self.sections
