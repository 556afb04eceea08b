"""What the caller says about tools, and what the model proposed: declarations, calls, and why a call was not accepted.

A call is a proposal. Refuses to know wire formats, schemas' meaning and HTTP. Read next: ``text/tool_calls.py`` (what
makes a proposal a call), ``text/classifier.py`` (where they come from).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ToolValidation = Literal["strict", "forward"]
"""``strict``: only calls whose arguments validate are calls. ``forward``: closed and well-formed calls of advertised
tools are handed on although their arguments fail the schema, with the error beside them."""

ToolChoiceMode = Literal["auto", "none", "required", "named"]

ToolErrorReason = Literal[
    "malformed",
    "unclosed",
    "unknown_tool",
    "arguments_not_json",
    "arguments_not_object",
    "duplicate_key",
    "arguments_invalid",
    "arguments_too_large",
    "too_many_calls",
]
"""Why a proposal was not accepted, in words that do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One advertised tool. ``parameters`` is JSON Schema 2020-12 as the caller wrote it; None takes any object."""

    name: str
    parameters: Mapping[str, Any] | bool | None = None
    description: str = ""
    strict: bool = False
    """The caller asks that arguments be constrained while they are generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """What the caller allows: ``named`` goes with the ``name`` of one advertised tool."""

    mode: ToolChoiceMode = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """A way to write calls that no module describes, in the words that stand around its parts; white space is free.

    A JSON object that holds name and arguments between markers; or, with ``between``, a name and the arguments as a
    JSON object: opening marker, ``before_name``, name, ``between``, object, ``after``.
    """

    opens: tuple[str, ...]
    """Each begins a call."""
    closes: tuple[str, ...] = ()
    """One of them ends it; empty where ``after`` does."""
    named: bool = False
    """Whether name and arguments stand apart."""
    before_name: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolError:
    """A proposal that was not accepted, or one that was forwarded although its arguments fail their schema."""

    reason: ToolErrorReason
    message: str
    name: str | None = None
    """The tool the model named, where it got that far."""
    call_id: str | None = None
    """The id under which the proposal was streamed or forwarded, if it was."""
    pointer: str = ""
    """JSON pointer into the arguments where the schema failed; empty for the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A proposal that was accepted (or forwarded). ``arguments`` is the text of one JSON object."""

    index: int
    id: str
    name: str
    arguments: str
    error: ToolError | None = None
    """Set on forwarded calls alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of a streamed call: the first of an index carries id and name, every one a part of the arguments.

    Joining ``arguments`` of one index gives the arguments of its ``ToolCall``. An index whose call is withdrawn (only
    with ``eager`` streaming) ends in a ``ToolError`` with its ``call_id`` and is never used again.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPolicy:
    """How proposals of one request are handled."""

    tools: tuple[ToolSpec, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    validation: ToolValidation = "strict"
    parallel: bool = True
    """False: the answer ends with its first accepted call."""
    eager: bool = False
    """Stream arguments while the call is still open, before it is known whether it will be accepted."""
