"""Owns the form in which one model's template takes a conversation: a few choices, and the shaping by them.

Knows no template source; the probe finds the choices by rendering. Read next: ``messages.py`` (what comes in),
``template_probe.py`` (chooses), ``chat_renderer.py`` (applies).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from troth.contracts.capabilities import SystemPlace
from troth.contracts.tools import CallForm
from troth.text.tool_declarations import with_every_field
from troth.text.tool_formats.written import write_calls

ContentForm = Literal["text", "parts"]
ArgumentsForm = Literal["object", "text"]
ReasoningForm = Literal["reasoning_content", "reasoning", "thinking", "tool_plan", "thought", "part", "blocks"]
ResultForm = Literal["text", "list", "user"]
DeclarationForm = Literal["wrapped", "flat", "functions", "definitions"]

_SHORT_ID: Final = 9
"""Length of the call ids that Mistral's templates insist on."""
_BETWEEN_SYSTEM_TEXTS: Final = "\n\n"
_AFTER_FOLDED_SYSTEM: Final = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """How a template wants what it reads. The defaults are what most of Hugging Face's take."""

    content: ContentForm = "text"
    """A string, or a list of parts with a type."""
    null_content: bool = False
    """Beside calls an empty content is null: some templates write calls only there."""
    system: SystemPlace = "anywhere"
    """leading: later system messages join the first; none: they open the first user message."""
    arguments: ArgumentsForm = "object"
    """Arguments of past calls as an object, or as its JSON text."""
    reasoning: ReasoningForm = "reasoning_content"
    """The field that past reasoning stands in; ``part`` is a first content part of type thinking; with ``blocks``
    (Apertus) every answer is an object of blocks, thoughts first."""
    short_call_ids: bool = False
    """Call ids must be nine letters and digits; others are replaced by a hash of themselves."""
    results: ResultForm = "text"
    """A tool's result as a string, as a list of one, or as what a user says."""
    written_calls: str | None = None
    """The wire format in which past calls are written into the content, where the template writes none; None: it does.
    """
    call_form: CallForm | None = None
    """That format, where no module describes it."""
    declarations: DeclarationForm = "wrapped"
    """Tools as {type, function}, as the bare function, as JSON text in a variable ``functions``, or as the bare
    function with ``parameter_definitions`` (Command R)."""
    every_field: bool = False
    """Properties of declarations need a description and a type, whether a client gave them or not."""
    system_with_tools: bool = False
    """Tools are declared inside a system message only, so an empty one is put where there is none."""


def shape_messages(
    messages: Sequence[Mapping[str, Any]], form: MessageForm, *, with_tools: bool = False
) -> list[dict[str, Any]]:
    """Normalised messages (``messages.py``) in the form one template takes. Nothing given is changed."""
    shaped = _place_system([_copy(message) for message in messages], form.system)
    if with_tools and form.system_with_tools and (not shaped or shaped[0]["role"] != "system"):
        shaped.insert(0, {"role": "system", "content": ""})
    _name_results(shaped)
    for message in shaped:
        _shape(message, form)
    return shaped


def _copy(message: Mapping[str, Any]) -> dict[str, Any]:
    copied = dict(message)
    if "tool_calls" in copied:
        copied["tool_calls"] = [{**call, "function": dict(call["function"])} for call in copied["tool_calls"]]
    return copied


def _place_system(messages: list[dict[str, Any]], place: SystemPlace) -> list[dict[str, Any]]:
    """One system message at the start, where the template hears it there; else its text opens the first user turn."""
    num_leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if place == "anywhere":
        system, others = messages[:num_leading], messages[num_leading:]
    else:
        system = [message for message in messages if message["role"] == "system"]
        others = [message for message in messages if message["role"] != "system"]
    if not system:
        return others
    text = _BETWEEN_SYSTEM_TEXTS.join(message["content"] for message in system if message["content"])
    if place != "none":
        return [{**system[0], "content": text}, *others]
    if not text:
        return others
    first = next((message for message in others if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": text}, *others]
    first["content"] = text + _AFTER_FOLDED_SYSTEM + first["content"]
    return others


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Calls get ids and results the name of the tool they answer, where clients left them out.

    Templates ask for either; OpenAI's API has only the id. A result without an id answers the next open call.
    """
    waiting: dict[str, str] = {}
    num_calls = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            num_calls += 1
            call.setdefault("id", f"call_{num_calls}")
            waiting[call["id"]] = call["function"]["name"]
        if message["role"] == "tool":
            call_id = message.setdefault("tool_call_id", next(iter(waiting), ""))
            name = waiting.pop(call_id, None)
            if name is not None:
                message.setdefault("name", name)


def _shape(message: dict[str, Any], form: MessageForm) -> None:
    reasoning = message.pop("reasoning_content", None)
    if form.written_calls is not None and message.get("tool_calls"):
        _write_calls(message, form)
    if form.results == "user" and message["role"] == "tool":
        message["role"] = "user"
    if form.results == "list" and message["role"] == "tool":
        message["content"] = [message["content"]]
    elif form.null_content and message["content"] == "" and message.get("tool_calls"):
        message["content"] = None
    elif form.content == "parts" and isinstance(message["content"], str):
        message["content"] = [{"type": "text", "text": message["content"]}]
    if form.reasoning == "blocks" and message["role"] == "assistant":
        thoughts = [{"type": "thoughts", "text": reasoning}] if reasoning else []
        response = [{"type": "response", "text": message["content"]}] if message["content"] else []
        message["content"] = {"blocks": [*thoughts, *response]}
    elif reasoning is not None:
        _put_reasoning(message, reasoning, form)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if form.arguments == "text" and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if form.short_call_ids:
            call["id"] = short_call_id(call["id"])
    if form.short_call_ids and message.get("tool_call_id"):
        message["tool_call_id"] = short_call_id(message["tool_call_id"])


def _write_calls(message: dict[str, Any], form: MessageForm) -> None:
    assert form.written_calls is not None, form
    functions = [call["function"] for call in message.pop("tool_calls")]
    calls = [(function["name"], function["arguments"]) for function in functions]
    said = [message["content"]] if message["content"] else []
    message["content"] = "\n".join([*said, write_calls(form.written_calls, calls, form.call_form)])


def _put_reasoning(message: dict[str, Any], reasoning: str, form: MessageForm) -> None:
    if form.reasoning != "part":
        message[form.reasoning] = reasoning
        return
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    message["content"] = [{"type": "thinking", "thinking": reasoning}, *parts]


def short_call_id(call_id: str) -> str:
    """``call_id`` itself when it is nine letters and digits, else nine that stand for it, the same ones every time."""
    if len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID]


def shape_declarations(
    tools: Sequence[Mapping[str, Any]] | None, form: MessageForm, now: Callable[[], datetime]
) -> dict[str, Any]:
    """Template variables that declare ``tools``, which are in OpenAI's wrapped form; none where there are no tools.

    The form ``functions`` (FireFunction's) needs its variables with and without tools, the time of day among them.
    """
    if tools is not None and form.every_field:
        tools = with_every_field(tools)
    functions = [tool["function"] for tool in tools or ()]
    if form.declarations == "functions":
        text = json.dumps(functions, ensure_ascii=False, indent=4)
        return {"functions": text, "datetime": now().strftime("%Y-%m-%d %H:%M:%S")}
    if tools is None:
        return {}
    if form.declarations == "definitions":
        return {"tools": [_with_definitions(function) for function in functions]}
    return {"tools": functions if form.declarations == "flat" else list(tools)}


_PYTHON_TYPES: Final = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list"}


def _with_definitions(function: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as Command R's first templates read them: a mapping of name to type, description and required."""
    schema = function["parameters"]
    required = schema.get("required")
    definitions = {
        name: {
            "description": str(value.get("description", "")),
            "type": _PYTHON_TYPES.get(str(value.get("type")), "dict"),
            "required": isinstance(required, list) and name in required,
        }
        for name, value in schema["properties"].items()
    }
    return {"name": function["name"], "description": function["description"], "parameter_definitions": definitions}
