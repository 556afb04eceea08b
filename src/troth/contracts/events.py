"""What a consumer sees of one request, in order: Queued? Prefill* (Segment | calls)* (Completed | Failed).

Every stream ends with exactly one Completed or Failed. ``num_completion_tokens`` is cumulative and counts each emitted
token once, however many segments a token produced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from troth.contracts.plan import TokenLogprobs
from troth.contracts.speculation import SpeculationStats
from troth.contracts.tools import ToolCall, ToolCallDelta, ToolError

FinishReason = Literal["stop", "length", "tool_calls", "aborted"]
SegmentKind = Literal["text", "reasoning", "tool_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The request waits for a row. ``position`` 0 is next."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prompt progress in tokens: ``num_done`` of ``num_total``, of which ``num_cached`` came from the cache."""

    num_done: int
    num_cached: int
    num_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """One emitted token with its log-probabilities, for callers who asked."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of the answer. Concatenating the texts of one kind gives the final text of that kind, always."""

    text: str
    kind: SegmentKind = "text"
    tokens: tuple[TokenText, ...] = ()
    """Tokens first accounted for by this segment; text may lag behind them (split characters, stop strings)."""
    num_completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request. ``num_cached_tokens`` is what the cache served, never what was recomputed."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of one request, on the engine's monotonic clock."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    """From leaving the queue to the first sampled token."""
    decode_s: float = 0.0
    """From the first sampled token to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The request ended by itself or by its consumer."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings = field(default_factory=Timings)
    seed: int = 0
    stop_match: str | None = None
    """The stop string that ended the answer, if one did."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    unclosed_reasoning: bool = False
    """The answer ended inside its reasoning."""
    speculation: SpeculationStats | None = None
    """What became of the drafts, where some were to be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request ended by an error. ``kind`` names the class in ``troth.errors``."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    reason: str | None = None
    """Why it was cancelled, if it was."""
    numbers: dict[str, int] = field(default_factory=dict)
    """What the message counts, by name: num_prompt_tokens, limit, wanted_bytes ..."""


Event = Queued | Prefill | Segment | ToolCallDelta | ToolCall | ToolError | Completed | Failed
