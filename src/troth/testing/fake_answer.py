"""What a FakeEngine says to one request, as the events of each step.

Refuses to know rows, queues and time. Read next: ``fake_engine.py``.
"""

from __future__ import annotations

import itertools
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from dataclasses import dataclass

from troth.contracts.events import (
    Completed,
    Event,
    Failed,
    FinishReason,
    Prefill,
    Segment,
    SegmentKind,
    Timings,
    TokenText,
    Usage,
)
from troth.contracts.plan import TokenLogprobs
from troth.contracts.request import Request
from troth.contracts.speculation import SpeculationStats
from troth.contracts.tools import ToolCall, ToolCallDelta, ToolError
from troth.testing.byte_tokenizer import EOS_ID, ByteTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeAnswer:
    """What the engine says to one request. Without EOS ids the text repeats until the limit."""

    text: str = "Hello from a fake engine."
    reasoning: str = ""
    """Comes first, as segments of kind ``reasoning``."""
    calls: tuple[ToolCall, ...] = ()
    """Accepted calls, after the text; each is streamed in two pieces."""
    errors: tuple[ToolError, ...] = ()
    """Proposals that were no calls, after the calls."""
    unclosed_reasoning: bool = False
    """What the end says of it."""
    speculation: SpeculationStats | None = None
    """What the end says of drafts."""
    step_tokens: int = 1
    """Tokens emitted per step."""
    chunk_tokens: int = 1 << 30
    """Prompt tokens fed per step."""
    num_cached_tokens: int = 0
    """Prompt tokens that count as served by the prompt cache."""
    failure: Failed | None = None
    fail_at: int = 0
    """Tokens emitted before ``failure``; 0: right after Prefill(num_done=0)."""


@dataclass(slots=True)
class Thinking:
    """Whether an answer may still reason."""

    ended: bool = False

    def end(self) -> None:
        """It may not, from the next token on."""
        self.ended = True


def play(
    answer: FakeAnswer, request: Request, room_tokens: int, thinking: Thinking | None = None
) -> Iterator[list[Event]]:
    """The events of each step; ``room_tokens`` is the limit of an answer whose request names none."""
    started = time.monotonic()
    total, cached = len(request.prompt_ids), answer.num_cached_tokens
    yield [Prefill(num_done=0, num_cached=cached, num_total=total)]
    if answer.failure is not None and answer.fail_at == 0:
        yield [answer.failure]
    for start in range(cached, total, answer.chunk_tokens):
        done = min(start + answer.chunk_tokens, total)
        yield [Prefill(num_done=done, num_cached=cached, num_total=total)]
    prefilled = time.monotonic()
    tokens = itertools.islice(_tokens(answer, request, thinking or Thinking()), request.max_tokens or room_tokens)
    writer = _Writer(request)
    step = list(itertools.islice(tokens, answer.step_tokens))
    while step:
        if answer.failure is not None and writer.num_emitted >= answer.fail_at:
            yield [answer.failure]
        following = list(itertools.islice(tokens, answer.step_tokens))
        yield writer.segments(step, final=not following)
        last, step = step[-1], following
    yield _calls(answer)
    finish = last.finish or "length"
    usage = Usage(
        num_prompt_tokens=total,
        num_completion_tokens=writer.num_emitted,
        num_cached_tokens=cached,
        num_reasoning_tokens=writer.num_reasoning,
    )
    completed = Completed(
        finish_reason="tool_calls" if answer.calls and finish == "stop" else finish,
        usage=usage,
        timings=Timings(prefill_s=prefilled - started, decode_s=time.monotonic() - prefilled),
        seed=request.sampling.seed,
        stop_match=last.stop_match,
        prompt_logprobs=_prompt_logprobs(request),
        unclosed_reasoning=answer.unclosed_reasoning,
        speculation=answer.speculation,
    )
    yield [completed]


def _calls(answer: FakeAnswer) -> list[Event]:
    events: list[Event] = []
    for call in answer.calls:
        events.append(ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments[:2]))
        if call.arguments[2:]:
            events.append(ToolCallDelta(index=call.index, arguments=call.arguments[2:]))
        events.append(call)
    return [*events, *answer.errors]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    token_id: int
    kind: SegmentKind = "text"
    visible: bool = True
    finish: FinishReason | None = None
    stop_match: str | None = None


def _tokens(answer: FakeAnswer, request: Request, thinking: Thinking) -> Iterator[_Token]:
    """The tokens of an answer without a limit; endless when nothing can end it."""
    encode = ByteTokenizer().encode
    for token_id in encode(answer.reasoning):
        if thinking.ended:
            break
        yield _Token(token_id=token_id, kind="reasoning")
    matches = [(answer.text.find(stop), stop) for stop in request.stop if stop in answer.text]
    if matches:
        cut, stop = min(matches)
        for token_id in encode(answer.text[:cut]):
            yield _Token(token_id=token_id)
        *head, last = encode(stop)
        for token_id in head:
            yield _Token(token_id=token_id, visible=False)
        yield _Token(token_id=last, visible=False, finish="stop", stop_match=stop)
        return
    for _ in itertools.count():
        for token_id in encode(answer.text):
            yield _Token(token_id=token_id)
        if request.eos_ids or not answer.text:
            yield _Token(token_id=min(request.eos_ids, default=EOS_ID), visible=False, finish="stop")
            return


class _Writer:
    """Makes segments of tokens. Text lags behind while a character is incomplete, as in a real engine."""

    def __init__(self, request: Request) -> None:
        self.num_emitted = self.num_reasoning = 0
        self._num_top = request.sampling.logprobs
        self._decoders = {kind: getincrementaldecoder("utf-8")("replace") for kind in ("reasoning", "text")}

    def segments(self, tokens: list[_Token], *, final: bool) -> list[Event]:
        """The segments of one step, one per kind of text."""
        step: list[Event] = []
        for kind, group in itertools.groupby(tokens, key=lambda token: token.kind):
            members = list(group)
            self.num_emitted += len(members)
            self.num_reasoning += len(members) if kind == "reasoning" else 0
            shown = bytes(token.token_id for token in members if token.visible)
            step.append(
                Segment(
                    text=self._decoders[kind].decode(shown, final=final),
                    kind=kind,
                    tokens=tuple(
                        TokenText(token_id=token.token_id, logprobs=_logprobs(token.token_id, self._num_top))
                        for token in members
                    ),
                    num_completion_tokens=self.num_emitted,
                )
            )
        return step


def _logprobs(token_id: int, num_top: int | None) -> TokenLogprobs | None:
    if num_top is None:
        return None
    top_ids = [(token_id + offset) % ByteTokenizer.vocab_size for offset in range(num_top)]
    top_logprobs = [-0.25 - offset for offset in range(num_top)]
    return TokenLogprobs(token_id, -0.25, 1, top_ids, top_logprobs)


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs, ...] | None:
    num_top = request.sampling.prompt_logprobs
    entries = (_logprobs(token_id, num_top) for token_id in request.prompt_ids[1:])
    return None if num_top is None else tuple(entry for entry in entries if entry is not None)
