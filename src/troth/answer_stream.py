"""What the Python face hands out: an answer piece by piece, and whole.

Refuses to know how requests are made (``library.py``) and how events travel (``run/stream.py``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from troth.contracts.events import (
    Completed,
    Event,
    Failed,
    FinishReason,
    Segment,
    SegmentKind,
    Timings,
    TokenText,
    Usage,
)
from troth.contracts.failures import error_from_event
from troth.contracts.plan import TokenLogprobs
from troth.contracts.speculation import SpeculationStats
from troth.contracts.tools import ToolCall, ToolError

if TYPE_CHECKING:
    from troth.library import Engine
    from troth.run.stream import RequestStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A whole answer."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    """Give it back to get the same answer again."""
    reasoning: str = ""
    """What was thought before ``text``, for models that mark it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_errors: tuple[ToolError, ...] = ()
    """Proposals that were no calls (they stay in ``text``), and forwarded ones whose arguments are wrong."""
    unclosed_reasoning: bool = False
    """The answer ended while it was still reasoning."""
    tokens: tuple[TokenText, ...] = ()
    """Every emitted token, when log-probabilities were asked for."""
    speculation: SpeculationStats | None = None
    """What became of the drafts, where some were to be made."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class AnswerStream:
    """An answer under way: iterate it, blocking or async, for its segments; then ``reply`` holds the whole.

    Leaving it (``with``, ``async with``, or dropping it) cancels what is left.
    """

    def __init__(self, stream: RequestStream, engine: Engine) -> None:
        self._stream = stream
        self._engine = engine
        """Held, because an engine that nobody holds is closed."""
        self._segments: list[Segment] = []
        self._calls: list[ToolCall] = []
        self._errors: list[ToolError] = []
        self._reply: Reply | None = None

    @property
    def reply(self) -> Reply:
        """The whole answer. Raises RuntimeError while it is still being streamed."""
        if self._reply is None:
            raise RuntimeError("the answer is not complete; iterate the stream to its end first")
        return self._reply

    def cancel(self) -> None:
        """Stop generating; iteration then ends with what there is."""
        self._stream.cancel()

    def end_reasoning(self) -> None:
        """Close the reasoning now, or as it begins; the answer follows. No effect once it is over."""
        self._stream.end_reasoning()

    def events(self) -> Iterator[Event]:
        """Every event, progress included, up to and with the last. Raises what ended the request."""
        for event in self._stream:
            self._take(event)
            yield event

    async def events_async(self) -> AsyncIterator[Event]:
        """As ``events``."""
        async for event in self._stream:
            self._take(event)
            yield event

    def __iter__(self) -> Iterator[Segment]:
        return (event for event in self.events() if isinstance(event, Segment))

    async def __aiter__(self) -> AsyncIterator[Segment]:
        async for event in self.events_async():
            if isinstance(event, Segment):
                yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    def _said(self, kind: SegmentKind) -> str:
        return "".join(segment.text for segment in self._segments if segment.kind == kind)

    def _take(self, event: Event) -> None:
        if isinstance(event, Segment):
            self._segments.append(event)
        elif isinstance(event, ToolCall):
            self._calls.append(event)
            self._errors += [event.error] if event.error else []
        elif isinstance(event, ToolError):
            self._errors.append(event)
        elif isinstance(event, Failed):
            raise error_from_event(event)
        elif isinstance(event, Completed):
            self._reply = Reply(
                text=self._said("text"),
                reasoning=self._said("reasoning"),
                tool_calls=tuple(self._calls),
                tool_errors=tuple(self._errors),
                unclosed_reasoning=event.unclosed_reasoning,
                finish_reason=event.finish_reason,
                usage=event.usage,
                timings=event.timings,
                seed=event.seed,
                speculation=event.speculation,
                tokens=tuple(token for segment in self._segments for token in segment.tokens),
                prompt_logprobs=event.prompt_logprobs,
            )
