"""POST /v1/chat/completions: its body, and its answer whole and streamed.

Refuses to know how the answer is fetched (``generation.py``) and how messages become tokens (``text/``). Format: the
public OpenAI API reference, chat completions. Read next: ``reply.py``, ``messages.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from troth.contracts.events import Completed, Segment
from troth.contracts.sampling import MAX_TOP_LOGPROBS
from troth.contracts.tools import ToolCall, ToolCallDelta
from troth.errors import RequestError
from troth.serve.fields import Fields
from troth.serve.grammar import Wanted
from troth.serve.logprobs import chat_entries
from troth.serve.messages import read_messages
from troth.serve.model import ModelList, ServedModel, Tokenizer
from troth.serve.prediction import read_prediction
from troth.serve.reply import Answer, Generation, RecordHead, encode, engine_requests, require_usable
from troth.serve.sampling import read_wishes
from troth.serve.terms import read_terms
from troth.text.chat_terms import ChatModel

_CHUNK: Final = "chat.completion.chunk"
_HINTS: Final = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
"""Known fields without effect on the answer."""
_OLD_TOOLS: Final = "it is the older form of tools and tool_choice"
_DELTA_FIELD: Final = {"text": "content", "reasoning": "reasoning_content"}


def read_chat(fields: Fields, models: ModelList) -> Generation:
    """Build the generation of one body. Raises RequestError, ContextExceeded, UnknownModel, NotReady."""
    model = models.find(fields.text("model"))
    info = model.client.info
    _refuse_unsupported(fields)
    messages, continue_final = read_messages(fields)
    variables = fields.object("chat_template_kwargs")
    wishes = read_wishes(fields, model)
    num_top = _logprobs(fields)
    wishes = replace(
        wishes,
        sampling=replace(wishes.sampling, logprobs=num_top),
        speculation=read_prediction(fields, model.tokenizer),
    )
    terms = read_terms(fields)
    chat = ChatModel(model.capabilities, model.tokenizer, model.calls)
    unchecked = terms.require_served(model.capabilities)
    if (effort := terms.untaken_effort(model.capabilities)) is not None:
        # Clients send it to every model, so it is no reason to refuse one that knows nothing of it; it is told.
        unchecked += (f"{effort}: this model's template takes none",)
    asked = terms.variables(model.capabilities) | dict(variables.items() if variables else ())
    head = RecordHead("chatcmpl", model)
    prompt = model.prompts.chat(messages, terms.shown_tools, variables=asked or None, continue_final=continue_final)
    require_usable(prompt, wishes, info, "messages")
    wanted = wishes.grammar
    param = wanted.param if wanted else terms.grammar_field
    grammar = terms.bound(wanted.grammar if wanted else None, chat, prompt.text, param=param)
    wishes = replace(wishes, grammar=Wanted(grammar, param) if grammar else None)
    reading = terms.reading(chat, prompt.text, continues=continue_final)
    requests = engine_requests(head.generation_id, [prompt], wishes, model, info, reading)
    reply = ChatReply(head, len(requests), model, with_logprobs=num_top is not None)
    ignored = tuple(fields.unknown())
    return Generation(
        model=model, requests=requests, wishes=wishes, reply=reply, ignored=ignored, not_enforced=unchecked
    )


class ChatReply:
    """Writes chat completions and their chunks."""

    def __init__(self, head: RecordHead, num_choices: int, model: ServedModel, *, with_logprobs: bool) -> None:
        self._head = head
        self._tokenizer: Tokenizer = model.tokenizer
        self._with_logprobs = with_logprobs
        # One record per token and stream: everything but the text is made once.
        self._starts = [
            {
                kind: head.choice_start(_CHUNK, choice) + b'"delta":{"%b":' % field.encode()
                for kind, field in _DELTA_FIELD.items()
            }
            for choice in range(num_choices)
        ]

    @property
    def generation_id(self) -> str:
        """As Reply."""
        return self._head.generation_id

    def opening(self) -> bytes:
        """The role of every choice."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._head.record(_CHUNK, {"choices": [_choice(choice, delta=delta)]})
            for choice in range(len(self._starts))
        )

    def segment(self, choice: int, segment: Segment) -> bytes:
        """One delta."""
        start = self._starts[choice].get(segment.kind)
        if start is None:
            return self._unshown(choice, segment)
        if self._with_logprobs and segment.tokens:
            logprobs = encode({"content": chat_entries(segment.tokens, self._tokenizer), "refusal": None})
            return b'%b%b},"logprobs":%b,"finish_reason":null}]}\n\n' % (
                start,
                encode(segment.text),
                logprobs,
            )
        if not segment.text:
            return b""
        return b'%b%b},"logprobs":null,"finish_reason":null}]}\n\n' % (start, encode(segment.text))

    def call_delta(self, choice: int, delta: ToolCallDelta) -> bytes:
        """A piece of a call; the first of an index has its id and name."""
        call: dict[str, Any] = {"index": delta.index}
        if delta.id is not None:
            call |= {"id": delta.id, "type": "function"}
        named = {} if delta.name is None else {"name": delta.name}
        call["function"] = {**named, "arguments": delta.arguments}
        return self._head.record(_CHUNK, {"choices": [_choice(choice, delta={"tool_calls": [call]})]})

    def closing(self, choice: int, completed: Completed, extension: dict[str, Any]) -> bytes:
        """The finish reason, and what repeats the run."""
        ended = _choice(choice, delta={}, finish_reason=completed.finish_reason)
        return self._head.record(_CHUNK, {"choices": [ended], "troth": extension})

    def _unshown(self, choice: int, segment: Segment) -> bytes:
        """The span of a call is told as a call; only its tokens may be left to tell."""
        if not self._with_logprobs or not segment.tokens:
            return b""
        logprobs = {"content": chat_entries(segment.tokens, self._tokenizer), "refusal": None}
        return self._head.record(_CHUNK, {"choices": [{**_choice(choice, delta={}), "logprobs": logprobs}]})

    def notice(self, extension: dict[str, Any]) -> bytes:
        """Progress before the first token."""
        return self._head.record(_CHUNK, {"choices": [], "troth": extension})

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The usage record."""
        return self._head.record(_CHUNK, {"choices": [], "usage": usage})

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any], extension: dict[str, Any]) -> bytes:
        """The chat completion object."""
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        fields = self._head.fields("chat.completion")
        return encode({**fields, "choices": choices, "usage": usage, "troth": extension})

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        text: str | None = answer.text("text")
        # Beside calls OpenAI's API has null for an answer without words.
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if answer.calls else ""),
            "refusal": None,
        }
        if reasoning := answer.text("reasoning"):
            message["reasoning_content"] = reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        logprobs = None
        if self._with_logprobs:
            logprobs = {"content": chat_entries(answer.tokens, self._tokenizer), "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": answer.completed.finish_reason,
        }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _choice(index: int, *, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if num_top is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (num_top or 0) if wanted else None


def _refuse_unsupported(fields: Fields) -> None:
    fields.refuse("functions", _OLD_TOOLS)
    fields.refuse("function_call", _OLD_TOOLS, unless=("none", "auto"))
    fields.refuse("modalities", "only text is generated", unless=(["text"],))
    fields.refuse("audio", "this server hears and speaks no audio")
    fields.refuse("web_search_options", "this server does not search the web")
    fields.refuse("verbosity", "there is no such setting")
    fields.tolerate(*_HINTS)
