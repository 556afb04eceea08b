"""From token ids to what the consumer sees: text, stop strings, log-probabilities, counts.

One emitter per request. Refuses to know about rows, blocks and queues. The text of a stream is the text of the whole
answer: both come from the same detokeniser and stop matcher (``text/``), whatever the chunking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from troth.contracts.events import FinishReason, Segment, TokenText
from troth.contracts.plan import TokenLogprobs
from troth.contracts.request import Request
from troth.text.detokenize import Detokenizer, TokenBytes
from troth.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Emission:
    """What a batch of new tokens means for the consumer."""

    segments: tuple[Segment, ...]
    num_emitted: int
    """Tokens of the request handed over so far; fewer than were offered when a stop string cut them."""
    finish: FinishReason | None


class Emitter:
    """Owns the text state of one request."""

    def __init__(self, request: Request, tokenizer: TokenBytes) -> None:
        self._eos_ids = request.eos_ids
        self._wants_logprobs = request.sampling.logprobs is not None
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=not request.echo_special, at_start=not request.continues_text
        )
        self._stops = StopMatcher(request.stop) if request.stop else None
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
        return self._stops.match if self._stops else None

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

    def close(self) -> Emission:
        """End the request for another reason than its tokens; what was withheld is released."""
        return self._emission(self._flush(), "aborted")

    def _flush(self) -> str:
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        return self._stops.push(rest) + self._stops.flush()

    def _emission(self, text: str, finish: FinishReason | None) -> Emission:
        segments: tuple[Segment, ...] = ()
        if text or (self._pending and finish is not None):
            tokens, self._pending = tuple(self._pending), []
            segments = (Segment(text=text, tokens=tokens, num_completion_tokens=self.num_emitted),)
        return Emission(segments, self.num_emitted, finish)
