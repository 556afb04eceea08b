"""POST /v1/completions: its body, and its answer whole and streamed.

Refuses to know how the answer is fetched (``generation.py``). Format: the public OpenAI API reference, completions
(legacy). Read next: ``reply.py``, ``logprobs.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from troth.contracts.bounds import mistyped_json
from troth.contracts.events import Completed, Segment
from troth.contracts.sampling import MAX_TOP_LOGPROBS
from troth.contracts.tools import ToolCallDelta
from troth.errors import RequestError, StreamProtocol
from troth.serve.fields import Fields, missing
from troth.serve.logprobs import LegacyLogprobs
from troth.serve.model import ModelList, Prompt, Prompts, ServedModel
from troth.serve.reply import Answer, Generation, RecordHead, encode, engine_requests, require_usable
from troth.serve.sampling import MAX_CHOICES, read_wishes

_KIND: Final = "text_completion"
_KINDS: Final = ("text", "reasoning")
"""Without a chat format there is nothing to tell reasoning from an answer."""
_HINTS: Final = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")


def read_completion(fields: Fields, models: ModelList) -> Generation:
    """Build the generation of one body. Raises RequestError, ContextExceeded, UnknownModel, NotReady."""
    model = models.find(fields.text("model"))
    info = model.client.info
    fields.refuse("suffix", "text is only continued at its end", unless=("",))
    fields.refuse("best_of", "every choice is returned; use n", unless=(1, fields.raw("n")))
    fields.refuse("tools", "completions have no tools")
    fields.tolerate(*_HINTS)
    wishes = read_wishes(fields, model)
    num_top = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    echo = fields.flag("echo")
    if echo and num_top is not None and wishes.stream:
        raise RequestError(
            "echo with logprobs is not supported in a stream: the prompt's log-probabilities come last. "
            "Leave stream out.",
            param="echo",
            code="unsupported_parameter",
        )
    sampling = replace(wishes.sampling, logprobs=num_top, prompt_logprobs=num_top if echo else None)
    wishes = replace(wishes, sampling=sampling)
    head = RecordHead("cmpl", model)
    prompts = [require_usable(prompt, wishes, info, "prompt") for prompt in _prompts(fields, model.prompts)]
    requests = engine_requests(head.generation_id, prompts, wishes, model, info)
    echoed = [_Echo.of(prompt, model) if echo else None for prompt in prompts for _ in range(wishes.num_choices)]
    return Generation(
        model=model,
        requests=requests,
        wishes=wishes,
        reply=CompletionReply(head, echoed, num_top, model),
        ignored=tuple(fields.unknown()),
    )


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt that is repeated before its answer."""

    text: str
    ids: Sequence[int]

    @classmethod
    def of(cls, prompt: Prompt, model: ServedModel) -> Self:
        return cls(prompt.text or model.tokenizer.decode(prompt.ids), prompt.ids)


class CompletionReply:
    """Writes legacy completions and their chunks.

    Args:
        head: the generation's first fields.
        echoed: what each choice repeats before its answer.
        num_top: log-probabilities wanted, or None.
        model: whose tokens they are.
    """

    def __init__(
        self, head: RecordHead, echoed: Sequence[_Echo | None], num_top: int | None, model: ServedModel
    ) -> None:
        self._head = head
        self._echoed = echoed
        self._num_top = num_top
        self._starts = [head.choice_start(_KIND, choice) + b'"text":' for choice in range(len(echoed))]
        self._logprobs = [LegacyLogprobs(model.tokenizer) for _ in echoed]

    @property
    def generation_id(self) -> str:
        """As Reply."""
        return self._head.generation_id

    def opening(self) -> bytes:
        """The echoed prompts."""
        return b"".join(
            self._head.record(_KIND, {"choices": [_choice(choice, prompt.text, None, None)]})
            for choice, prompt in enumerate(self._echoed)
            if prompt is not None
        )

    def segment(self, choice: int, segment: Segment) -> bytes:
        """One piece of text."""
        start = self._starts[choice]
        if self._num_top is not None and segment.tokens:
            logprobs = encode(self._logprobs[choice].answer(segment.tokens, self._num_top))
            return b'%b%b,"logprobs":%b,"finish_reason":null}]}\n\n' % (start, encode(segment.text), logprobs)
        if not segment.text:
            return b""
        return b'%b%b,"logprobs":null,"finish_reason":null}]}\n\n' % (start, encode(segment.text))

    def call_delta(self, choice: int, delta: ToolCallDelta) -> bytes:
        """Completions have no tools."""
        raise StreamProtocol(f"a call of {delta.name!r} in an answer without tools")

    def closing(self, choice: int, completed: Completed, extension: dict[str, Any]) -> bytes:
        """The finish reason, and what repeats the run."""
        ended = _choice(choice, "", None, completed.finish_reason)
        return self._head.record(_KIND, {"choices": [ended], "troth": extension})

    def notice(self, extension: dict[str, Any]) -> bytes:
        """Progress before the first token."""
        return self._head.record(_KIND, {"choices": [], "troth": extension})

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage record."""
        return self._head.record(_KIND, {"choices": [], "usage": usage})

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any], extension: dict[str, Any]) -> bytes:
        """The completion object."""
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        fields = self._head.fields(_KIND)
        return encode({**fields, "choices": choices, "usage": usage, "troth": extension})

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        prompt = self._echoed[index]
        text = answer.text(*_KINDS)
        logprobs = None
        if self._num_top is not None:
            pieces = self._logprobs[index]
            before = pieces.prompt(prompt.ids, answer.completed.prompt_logprobs or (), self._num_top) if prompt else {}
            after = pieces.answer(answer.tokens, self._num_top)
            logprobs = {name: [*before.get(name, ()), *values] for name, values in after.items()}
        return _choice(index, (prompt.text if prompt else "") + text, logprobs, answer.completed.finish_reason)


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _prompts(fields: Fields, prompts: Prompts) -> Iterator[Prompt]:
    """The prompts of a body: a string, token ids, or an array of either. Each is built when it is asked for."""
    value = fields.raw("prompt")
    if value is None:
        raise missing("prompt")
    if isinstance(value, str):
        yield prompts.completion(value)
        return
    if not isinstance(value, list):
        raise mistyped_json("prompt", "a string, an array of strings, or token ids", value)
    if not value:
        raise RequestError("prompt must not be empty", param="prompt")
    if isinstance(value[0], int):
        yield _token_prompt(value, "prompt", prompts)
        return
    if len(value) > MAX_CHOICES:
        raise RequestError(f"{len(value)} prompts in one request; at most {MAX_CHOICES}", param="prompt")
    for index, one in enumerate(value):
        yield _prompt(one, f"prompt[{index}]", prompts)


def _prompt(value: Any, name: str, prompts: Prompts) -> Prompt:
    if isinstance(value, str):
        return prompts.completion(value)
    if isinstance(value, list):
        return _token_prompt(value, name, prompts)
    raise mistyped_json(name, "a string or an array of token ids", value)


def _token_prompt(ids: list[Any], name: str, prompts: Prompts) -> Prompt:
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise mistyped_json(name, "an array of token ids alone", token_id)
    return prompts.token_ids(ids)
