"""What an answer is made of once it is classified: pieces, calls and errors; and what tells how a model marks them.

Plain values, nothing reads or decides here. Read next: ``classifier.py`` (produces them).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from troth.contracts.events import SegmentKind
from troth.contracts.tools import CallForm, ToolCall, ToolCallDelta, ToolError
from troth.text.channels import CHANNELS, ChannelFormat
from troth.text.reasoning import REASONING_FORMATS, ReasoningFormat
from troth.text.tool_formats import FORMATS, ToolFormat
from troth.text.tool_formats.derived import format_of

PieceKind = SegmentKind | Literal["marker"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the answer's text and what it is. ``tool_call`` is the span of accepted calls, markers included."""

    kind: PieceKind
    text: str
    verbatim: bool = False
    """Text of a call that was not accepted: control tokens in it are shown too."""


Output = Piece | ToolCallDelta | ToolCall | ToolError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """How a model marks its answers, as the template probe proved it. Everything None: all of it is text."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    channels: ChannelFormat | None = None

    @classmethod
    def named(
        cls,
        *,
        reasoning: str | None = None,
        tools: str | None = None,
        channels: str | None = None,
        call_form: CallForm | None = None,
    ) -> ReplyFormat:
        """The format of these names. Channels mark reasoning and calls too, and may stand for either.

        ``call_form`` is the format of calls that is called ``tools`` and stands in no registry.

        Raises KeyError on a name that is in no registry.
        """
        for name in (reasoning, tools):
            channels = name if name in CHANNELS else channels
        known = None
        if tools and tools not in CHANNELS:
            known = FORMATS[tools] if call_form is None else format_of(call_form, tools)
        return cls(
            reasoning=REASONING_FORMATS[reasoning] if reasoning and reasoning not in CHANNELS else None,
            tools=known,
            channels=CHANNELS[channels] if channels else None,
        )


@dataclass(slots=True)
class Reply:
    """Outputs folded into the whole answer. The stream and the whole agree because both are this."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[ToolError] = field(default_factory=list)

    def add(self, outputs: Iterable[Output]) -> None:
        """Take in what ``push`` or ``flush`` returned."""
        for output in outputs:
            if isinstance(output, ToolCall):
                self.calls.append(output)
            elif isinstance(output, ToolError):
                self.errors.append(output)
            elif isinstance(output, Piece) and output.kind == "text":
                self.text += output.text
            elif isinstance(output, Piece) and output.kind == "reasoning":
                self.reasoning += output.text
