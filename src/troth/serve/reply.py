"""What one HTTP generation is: its engine requests, and how its answer is written.

Refuses to know how answers are fetched and sent. Read next: ``openai_chat.py`` and ``openai_completions.py`` (what
builds it), ``generation.py`` (what runs it).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from troth.contracts.answer import AnswerReading
from troth.contracts.events import Completed, Segment, TokenText
from troth.contracts.names import RequestId
from troth.contracts.ports import EngineInfo
from troth.contracts.request import Request
from troth.contracts.tools import ToolCall, ToolCallDelta, ToolError
from troth.errors import ContextExceeded, RequestError
from troth.serve.model import Prompt, ServedModel
from troth.serve.prediction import prediction_counts, speculation_object
from troth.serve.sampling import MAX_CHOICES, Wishes

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Answer:
    """Everything one choice came to."""

    completed: Completed
    segments: list[Segment] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[ToolError] = field(default_factory=list)
    """Proposals that were no calls, and forwarded ones whose arguments are wrong."""

    def text(self, *kinds: str) -> str:
        """All text of these kinds, in order."""
        return "".join(segment.text for segment in self.segments if segment.kind in kinds)

    @property
    def tokens(self) -> list[TokenText]:
        """All tokens with their log-probabilities."""
        return [token for segment in self.segments for token in segment.tokens]


class Reply(Protocol):
    """Writes one generation's answer. ``choice`` is the index among its choices; chunks are whole SSE records."""

    @property
    def generation_id(self) -> str:
        """The id that clients see in it."""

    def opening(self) -> bytes:
        """Records before anything was generated."""

    def segment(self, choice: int, segment: Segment) -> bytes:
        """Records of one segment; may be none."""

    def call_delta(self, choice: int, delta: ToolCallDelta) -> bytes:
        """Records of a piece of a call."""

    def closing(self, choice: int, completed: Completed, extension: dict[str, Any]) -> bytes:
        """Records that end one choice."""

    def notice(self, extension: dict[str, Any]) -> bytes:
        """A record of progress, without choices."""

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage record at the end of a stream."""

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any], extension: dict[str, Any]) -> bytes:
        """The body of a reply that is not streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One HTTP generation, ready to run."""

    model: ServedModel
    requests: tuple[Request, ...]
    """One per choice; choices of one prompt lie together."""
    wishes: Wishes
    reply: Reply
    ignored: tuple[str, ...] = ()
    """Body fields nobody knows, for clients that ask."""
    not_enforced: tuple[str, ...] = ()
    """What was asked for and is not kept: keywords of the answer's schema by pointer, all else by field."""

    def extension(self, completed: Sequence[Completed], errors: Sequence[tuple[int, ToolError]] = ()) -> dict[str, Any]:
        """The ``troth`` object: what repeats the run, the time it took (of the slowest choice), and what went wrong.

        Args:
            completed: The ends of the choices it is about.
            errors: Of their calls, each with the index of its choice.
        """
        timings = {
            name: round(max(getattr(one.timings, name) for one in completed), 6)
            for name in ("queued_s", "prefill_s", "decode_s")
        }
        ignored = {"ignored": self.ignored} if self.ignored else {}
        not_enforced = {"not_enforced": self.not_enforced} if self.not_enforced else {}
        unclosed = {"unclosed_reasoning": True} if any(one.unclosed_reasoning for one in completed) else {}
        faults = {"tool_errors": [_fault(choice, error) for choice, error in errors]} if errors else {}
        speculation = speculation_object(completed)
        told = {**ignored, **not_enforced, **unclosed, **faults, **speculation}
        return {"seed": self.wishes.seed, "timings": timings, **told}

    def usage(self, completed: Sequence[Completed]) -> dict[str, Any]:
        """Token counts over all choices; a prompt counts once, however many choices it has."""
        usages = [one.usage for one in completed]
        of_prompts = usages[:: self.wishes.num_choices]
        num_prompt = sum(usage.num_prompt_tokens for usage in of_prompts)
        num_completion = sum(usage.num_completion_tokens for usage in usages)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in of_prompts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(usage.num_reasoning_tokens for usage in usages),
                **prediction_counts(completed),
            },
        }


class RecordHead:
    """The fields that every object of one generation starts with."""

    def __init__(self, prefix: str, model: ServedModel) -> None:
        self.generation_id = f"{prefix}-{secrets.token_hex(16)}"
        self._model = model.name
        self._created = int(time.time())

    def fields(self, kind: str) -> dict[str, Any]:
        """id, object, created, model."""
        return {"id": self.generation_id, "object": kind, "created": self._created, "model": self._model}

    def record(self, kind: str, rest: dict[str, Any]) -> bytes:
        """A whole SSE record."""
        return b"data: %b\n\n" % encode({**self.fields(kind), **rest})

    def choice_start(self, kind: str, choice: int) -> bytes:
        """An SSE record up to the fields of its only choice, to be ended by ``}]}`` and an empty line."""
        return b'data: %b,"choices":[{"index":%d,' % (encode(self.fields(kind))[:-1], choice)


def require_usable(prompt: Prompt, wishes: Wishes, info: EngineInfo, field: str) -> Prompt:
    """The prompt, which came from ``field`` of the body, if the engine will take it.

    The engine would refuse it too, but when other answers of the request may have begun already.

    Raises:
        RequestError: it has no tokens.
        ContextExceeded: the context does not hold it and its answer; ``param`` is max_tokens when the prompt alone
            would fit.
    """
    num_prompt, wanted = len(prompt.ids), wishes.max_tokens or 1
    if num_prompt == 0:
        raise RequestError(f"{field} has no tokens; send at least one", param=field)
    if num_prompt + wanted > info.context_tokens:
        raise ContextExceeded(
            num_prompt_tokens=num_prompt,
            max_tokens=wanted,
            limit=info.context_tokens,
            param="max_tokens" if num_prompt < info.context_tokens else field,
        )
    return prompt


def engine_requests(
    generation_id: str,
    prompts: Sequence[Prompt],
    wishes: Wishes,
    model: ServedModel,
    info: EngineInfo,
    reading: AnswerReading | None = None,
) -> tuple[Request, ...]:
    """One request per choice of each prompt; all answers are read alike.

    Raises RequestError when there can never be room for so many.
    """
    num_choices = len(prompts) * wishes.num_choices
    room = min(MAX_CHOICES, info.max_rows + info.max_waiting)
    if num_choices > room:
        raise RequestError(
            f"prompts ({len(prompts)}) times n ({wishes.num_choices}) is {num_choices} answers; "
            f"at most {room} fit into one request",
            param="n",
        )
    eos_ids = frozenset[int]() if wishes.ignore_eos else frozenset(model.tokenizer.eos_ids)
    ids = [tuple(prompt.ids) for prompt in prompts]
    return tuple(
        Request(
            request_id=RequestId(f"{generation_id}-{choice}"),
            prompt_ids=ids[choice // wishes.num_choices],
            sampling=wishes.sampling_of(choice),
            max_tokens=wishes.max_tokens,
            eos_ids=eos_ids,
            stop=wishes.stop,
            grammar=wishes.grammar.grammar if wishes.grammar else None,
            reading=reading,
            speculation=wishes.speculation,
            namespace=wishes.cache_salt,
            prompt_cache=wishes.prompt_cache,
            boundary=prompts[choice // wishes.num_choices].boundary,
            checkpoint_positions=prompts[choice // wishes.num_choices].checkpoint_positions,
            continues_text=prompts[choice // wishes.num_choices].continues_text,
        )
        for choice in range(num_choices)
    )


def _fault(choice: int, error: ToolError) -> dict[str, Any]:
    return {
        "choice": choice,
        "reason": error.reason,
        "message": error.message,
        "name": error.name,
        "call_id": error.call_id,
        "pointer": error.pointer,
    }
