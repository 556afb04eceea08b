"""Chat messages of a request body: shapes checked, content brought to plain text.

Refuses to know templates; what a model makes of a role is ``text/``'s business. Read next:
``openai_chat.py``.
"""

from __future__ import annotations

from typing import Any, Final

from troth.errors import CapabilityUnavailable, RequestError
from troth.serve.fields import Fields, missing, mistyped, shown

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS: Final = {"text": "text", "refusal": "refusal"}
"""Content part type -> its field with the text."""
_OTHER_PARTS: Final = ("image_url", "input_audio", "file", "video_url")
_CARRIED: Final = ("name", "tool_call_id", "reasoning_content", "reasoning")
"""String fields handed to the template as they are."""


def read_messages(fields: Fields) -> tuple[list[dict[str, Any]], bool]:
    """The conversation, and whether its last message is an assistant's that the answer continues.

    Every message has ``role`` and ``content`` (a string, parts joined by line breaks); those that had them
    keep ``tool_calls`` and the fields of ``_CARRIED``. An empty assistant message at the end begins an
    ordinary answer.

    Raises:
        RequestError: ``param`` names the message and field at fault.
    """
    values = fields.array("messages")
    if values is None:
        raise missing("messages")
    messages = []
    for index, value in enumerate(values):
        name = f"messages[{index}]"
        if not isinstance(value, dict):
            raise mistyped(name, "an object", value)
        messages.append(_message(Fields(value, name)))
    if messages and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    last = messages[-1]
    return messages, last["role"] == "assistant" and "tool_calls" not in last


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.text("role")
    if role not in ROLES:
        if role is None:
            raise missing(fields.name("role"))
        raise RequestError(
            f"{fields.name('role')} is {shown(role)}; known roles are {', '.join(ROLES)}",
            param=fields.name("role"),
        )
    message: dict[str, Any] = {"role": role}
    content = _content(fields)
    calls = fields.array("tool_calls")
    if calls:
        message["tool_calls"] = [_call(f"{fields.name('tool_calls')}[{i}]", call) for i, call in enumerate(calls)]
    if content is None and role != "assistant":
        raise missing(fields.name("content"))
    message["content"] = content or ""
    for name in _CARRIED:
        if (text := fields.text(name)) is not None:
            message[name] = text
    fields.refuse("function_call", "function calls of this form are obsolete; use tool_calls")
    fields.refuse("audio", "this server hears and speaks no audio")
    return message


def _content(fields: Fields) -> str | None:
    value = fields.raw("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise mistyped(fields.name("content"), "a string or an array of parts", value)
    return "\n".join(_part(f"{fields.name('content')}[{index}]", part) for index, part in enumerate(value))


def _part(name: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise mistyped(name, "an object", part)
    fields = Fields(part, name)
    kind = fields.text("type")
    if kind is None:
        raise missing(f"{name}.type")
    if kind in _OTHER_PARTS:
        raise CapabilityUnavailable(f"{kind} input", "this server reads text only", param=name)
    if kind not in _TEXT_PARTS:
        raise RequestError(f"{name}.type is {shown(kind)}; only text parts are known", param=f"{name}.type")
    text = fields.text(_TEXT_PARTS[kind])
    if text is None:
        raise missing(f"{name}.{_TEXT_PARTS[kind]}")
    return text


def _call(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise mistyped(name, "an object", value)
    call = Fields(value, name)
    function = call.object("function")
    if function is None:
        raise missing(f"{name}.function")
    function_name = function.text("name")
    if function_name is None:
        raise missing(f"{name}.function.name")
    return {
        "id": call.text("id") or "",
        "type": "function",
        "function": {"name": function_name, "arguments": function.text("arguments") or ""},
    }
