"""From token ids to what the consumer sees: text, stop strings, log-probabilities, counts.

One emitter per request. Refuses to know about rows, blocks and queues. The text of a stream is the text of the whole
answer: both come from the same detokeniser and stop matcher (``text/``), whatever the chunking. Read next:
``answer.py``, for answers that are more than text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from troth.contracts.events import FinishReason, Segment, SegmentKind, TokenText
from troth.contracts.plan import TokenLogprobs
from troth.contracts.request import Request
from troth.contracts.tools import ToolCall, ToolCallDelta, ToolError
from troth.run.answer import AnswerReader
from troth.text.detokenize import Detokenizer, TokenBytes
from troth.text.reply import Output, Piece
from troth.text.stop import StopMatcher

AnswerEvent = Segment | ToolCallDelta | ToolCall | ToolError


@dataclass(frozen=True, slots=True)
class Emission:
    """What a batch of new tokens means for the consumer."""

    events: tuple[AnswerEvent, ...]
    num_emitted: int
    """Tokens of the request handed over so far; fewer than were offered when a stop string cut them."""
    finish: FinishReason | None
    forced_ids: tuple[int, ...] = ()
    """Tokens among the emitted ones, the last, that nobody sampled: the rest of the engine must take them in."""


class Emitter:
    """Owns the text state of one request."""

    def __init__(self, request: Request, tokenizer: TokenBytes, *, whole: bool = False) -> None:
        self._eos_ids = request.eos_ids
        self._wants_logprobs = request.sampling.logprobs is not None
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=not request.echo_special, at_start=not request.continues_text
        )
        self._stops = StopMatcher(request.stop) if request.stop and request.reading is None else None
        self._reader = AnswerReader(request, request.reading, tokenizer) if request.reading is not None else None
        self._deferred: list[int] | None = None
        """Tokens that become text at the end, as nothing in the text can end the answer and nobody reads it before."""
        if whole and self._stops is None and self._reader is None:
            self._deferred = []
        self._num_prompt = len(request.prompt_ids)
        self._pending: list[TokenText] = []
        self.num_emitted = 0
        wants_prompt = request.sampling.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = (
            [None] * (self._num_prompt - 1) if wants_prompt else None
        )

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        if self._reader is not None:
            return self._reader.stop_match
        return self._stops.match if self._stops else None

    @property
    def num_reasoning_tokens(self) -> int:
        """Emitted tokens that became reasoning."""
        return self._reader.num_reasoning_tokens if self._reader is not None else 0

    @property
    def unclosed_reasoning(self) -> bool:
        """Whether the answer ended inside its reasoning."""
        return self._reader is not None and self._reader.unclosed_reasoning

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """One entry per prompt token after the first, when the request asked and the prompt is done."""
        if self._prompt_logprobs is None:
            return None
        return tuple(entry for entry in self._prompt_logprobs if entry is not None)

    def take_prompt_logprobs(self, entries: Sequence[TokenLogprobs], num_prefilled: int) -> None:
        """Keep a chunk's entries; a chunk computed again after preemption replaces its first copy."""
        if self._prompt_logprobs is not None and entries:
            end = min(num_prefilled, self._num_prompt - 1)
            self._prompt_logprobs[end - len(entries) : end] = entries

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: FinishReason | None
    ) -> Emission:
        """Take in newly emitted tokens; ``finish`` is how the scheduler ended the request, if it did."""
        if self._reader is not None:
            return self._read(self._reader, token_ids, logprobs, finish)
        if self._deferred is not None:
            return self._defer(self._deferred, token_ids, logprobs, finish)
        pieces: list[str] = []
        stopped = False
        for i, token_id in enumerate(token_ids):
            text = "" if token_id in self._eos_ids else self._detokenizer.push(token_id)
            self.num_emitted += 1
            if self._wants_logprobs:
                self._pending.append(TokenText(token_id=token_id, logprobs=logprobs[i] if logprobs else None))
            if self._stops is not None:
                text = self._stops.push(text)
                stopped = self._stops.match is not None
            if text:
                pieces.append(text)
            if stopped:
                break
        if stopped:
            finish = "stop"
        elif finish is not None:
            pieces.append(self._flush())
        return self._emission("".join(pieces), finish)

    def _defer(
        self,
        deferred: list[int],
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> Emission:
        deferred += token_ids
        self.num_emitted += len(token_ids)
        if self._wants_logprobs:
            found: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
            pairs = zip(token_ids, found, strict=True)
            self._pending += [TokenText(token_id=token_id, logprobs=entry) for token_id, entry in pairs]
        return self._emission("" if finish is None else self._flush(), finish)

    def begin(self) -> Emission:
        """What is emitted before the first token is sampled: the close of reasoning that may not even begin."""
        return self._read(self._reader, (), (), None) if self._reader is not None else Emission((), 0, None)

    def end_reasoning(self) -> Emission:
        """Close the reasoning now, or as it begins; what is emitted for it."""
        if self._reader is None:
            return Emission((), self.num_emitted, None)
        self._reader.end_reasoning()
        return self._read(self._reader, (), (), None)

    def close(self) -> Emission:
        """End the request for another reason than its tokens; what was withheld is released."""
        if self._reader is not None:
            return Emission(self._events(self._reader.flush(), ends=True), self.num_emitted, "aborted")
        return self._emission(self._flush(), "aborted")

    def _read(
        self,
        reader: AnswerReader,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> Emission:
        outputs: list[Output] = []
        forced_ids = reader.take_close_ids() if not token_ids and finish is None else ()
        for i, token_id in enumerate(token_ids):
            outputs += self._one(reader, token_id, logprobs[i] if logprobs else None)
            forced_ids = reader.take_close_ids()
            if forced_ids or reader.finished or reader.stop_match is not None:
                if i + 1 < len(token_ids):
                    finish = None  # what ended the answer for the scheduler is not part of it
                break
        for token_id in forced_ids:
            outputs += self._one(reader, token_id, None)
        if finish is None and (reader.finished or reader.stop_match is not None):
            finish = "stop"
        if finish is not None:
            outputs += reader.flush()
        if reader.stop_match is not None:
            finish = "stop"
        if finish == "stop" and reader.num_calls:
            finish = "tool_calls"
        return Emission(self._events(outputs, ends=finish is not None), self.num_emitted, finish, forced_ids)

    def _one(self, reader: AnswerReader, token_id: int, logprobs: TokenLogprobs | None) -> list[Output]:
        self.num_emitted += 1
        if self._wants_logprobs:
            self._pending.append(TokenText(token_id=token_id, logprobs=logprobs))
        return reader.push(token_id)

    def _events(self, outputs: Iterable[Output], *, ends: bool) -> tuple[AnswerEvent, ...]:
        """Outputs as events: neighbours of one kind are one segment, and the first segment accounts for the tokens."""
        merged: list[Output] = []
        for output in outputs:
            last = merged[-1] if merged else None
            if isinstance(output, Piece) and isinstance(last, Piece) and last.kind == output.kind:
                merged[-1] = Piece(last.kind, last.text + output.text)
            else:
                merged.append(output)
        events: list[AnswerEvent] = []
        for output in merged:
            if not isinstance(output, Piece):
                events.append(output)
            elif output.kind != "marker":
                events.append(self._segment(output.text, output.kind))
        if self._pending and ends:
            events.append(self._segment("", "text"))
        return tuple(events)

    def _segment(self, text: str, kind: SegmentKind) -> Segment:
        tokens, self._pending = tuple(self._pending), []
        return Segment(text=text, kind=kind, tokens=tokens, num_completion_tokens=self.num_emitted)

    def _flush(self) -> str:
        texts = [self._detokenizer.push(token_id) for token_id in self._deferred or () if token_id not in self._eos_ids]
        rest = "".join(texts) + self._detokenizer.flush()
        if self._stops is None:
            return rest
        return self._stops.push(rest) + self._stops.flush()

    def _emission(self, text: str, finish: FinishReason | None) -> Emission:
        if not text and finish is None:
            return Emission((), self.num_emitted, None)
        events: tuple[AnswerEvent, ...] = ()
        if text or (self._pending and finish is not None):
            tokens, self._pending = tuple(self._pending), []
            events = (Segment(text=text, tokens=tokens, num_completion_tokens=self.num_emitted),)
        return Emission(events, self.num_emitted, finish)
