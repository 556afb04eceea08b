"""Owns the form of chat messages: whatever a client sent becomes plain dicts that any template can read.

Knows no template and no API dialect. Read next: ``prompt.py`` (uses it), ``chat_template.py`` (renders the result).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from troth.contracts.bounds import mistyped_json, shown_json
from troth.errors import CapabilityUnavailable, RequestError
from troth.text.tokenizer import require_unicode

# Few templates know the developer role; to the others it is what the system role is. Function is tool's old name.
_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_MEDIA_PARTS: Final = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "input_audio",
        "audio",
        "video",
        "video_url",
        "file",
        "input_file",
        "document",
    }
)
_THINKING_PART: Final = "thinking"
_REASONING_NAMES: Final = ("reasoning_content", "reasoning", "thinking")


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """Checked copies of chat messages.

    Each has ``role`` and a string ``content`` (text parts joined by newlines; null, as beside tool calls, becomes
    empty), and where given ``name``, ``tool_calls``, ``tool_call_id`` and ``reasoning_content`` (under any of its
    names, or as content parts of type thinking). Null means absent; other fields are dropped.

    Raises:
        RequestError: an empty list, an unknown role, a wrong type or a part that is not text; ``param`` names the
            field, such as ``messages[2].content``.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise mistyped_json("messages", "a list of messages", messages)
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    return [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]


def split_continued(messages: Sequence[Any]) -> tuple[Sequence[Any], bool]:
    """The messages as they are to be rendered, and whether the answer continues the last of them.

    It does when that is an assistant's message of text. An empty one at the end, as some clients send it to show where
    the answer goes, is left out; one of reasoning alone is not: nothing can continue it. No more is checked.

    Raises:
        CapabilityUnavailable: the last message is reasoning alone.
    """
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or last.get("tool_calls"):
        return messages, False
    content = last.get("content")
    is_empty = content in ("", None, [])
    if (is_empty and any(last.get(name) for name in _REASONING_NAMES)) or _is_thoughts(content):
        raise CapabilityUnavailable(
            "continuing reasoning",
            "the last message is an assistant's and has no text; leave it out for a new answer, or give it text that "
            "the answer is to continue",
            param=f"messages[{len(messages) - 1}]",
        )
    return (messages[:-1], False) if is_empty else (messages, True)


def _is_thoughts(content: object) -> bool:
    """Whether content is parts of reasoning and nothing else."""
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes)) or not content:
        return False
    return all(isinstance(part, Mapping) and part.get("type") == _THINKING_PART for part in content)


def _normalise(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise mistyped_json(place, "an object", message)
    given = message.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        known = ", ".join(_ROLES)
        raise RequestError(f"{place}.role is {shown_json(given)}; it must be one of {known}", param=f"{place}.role")
    calls = message.get("tool_calls")
    content, thoughts = message.get("content"), None
    if role == "assistant" and isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content, thoughts = _without_thoughts(content, f"{place}.content")
    reasoning = _reasoning(message, place)
    reasoning = thoughts if reasoning is None else reasoning
    content = _text(content, f"{place}.content")
    if content is None and role != "assistant":
        raise RequestError(f"{place}.content is missing; a {given} message needs text", param=f"{place}.content")
    normal: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            normal[name] = _string(message[name], f"{place}.{name}")
    if reasoning is not None:
        normal["reasoning_content"] = reasoning
    if calls is not None:
        normal["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    return normal


def _reasoning(message: Mapping[str, Any], place: str) -> str | None:
    for name in _REASONING_NAMES:
        if message.get(name) is not None:
            return _string(message[name], f"{place}.{name}")
    return None


def _without_thoughts(parts: Sequence[object], place: str) -> tuple[list[object], str | None]:
    """The parts of an answer that are not reasoning, and the reasoning: some clients keep it among the content."""
    rest: list[object] = []
    thoughts = []
    for index, part in enumerate(parts):
        if isinstance(part, Mapping) and part.get("type") == _THINKING_PART:
            thoughts.append(_string(part.get(_THINKING_PART), f"{place}[{index}].{_THINKING_PART}"))
        else:
            rest.append(part)
    return rest, "\n".join(thoughts) if thoughts else None


def _text(content: object, place: str) -> str | None:
    if content is None or isinstance(content, str):
        return None if content is None else _string(content, place)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise mistyped_json(place, "a string or a list of parts", content)
    return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if not isinstance(part, Mapping):
        raise mistyped_json(place, "an object with type and text", part)
    kind = part.get("type")
    if kind in _MEDIA_PARTS:
        raise CapabilityUnavailable(
            f"{place}: content of type {kind}", "only text can be read here; leave it out", param=place
        )
    if kind != "text":
        raise RequestError(
            f"{place} is of type {shown_json(kind)}; only text parts can be read here", param=place, code="invalid_type"
        )
    return _string(part.get("text"), f"{place}.text")


def _tool_calls(calls: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise mistyped_json(place, "a list of calls", calls)
    return [_tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, place: str) -> dict[str, Any]:
    """A past call, its arguments as an object: templates write them out themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise mistyped_json(place, "an object with a function", call)
    name = _string(function.get("name"), f"{place}.function.name")
    arguments = _arguments(function.get("arguments"), f"{place}.function.arguments")
    normal: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        normal["id"] = _string(call["id"], f"{place}.id")
    return normal


def _arguments(arguments: object, place: str) -> dict[str, Any] | str:
    """Arguments as an object; text that is no JSON object, as a model may once have written it, stays text."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    text = _string(arguments, place)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _string(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise mistyped_json(place, "a string", value)
    require_unicode(value, place)
    return value
