"""The ``messages`` of a request body, and whether their last one is to be continued.

Refuses to know the form of a message: ``text/messages.py`` checks it, for every API. Read next: ``openai_chat.py``.
"""

from __future__ import annotations

from typing import Any

from troth.serve.fields import Fields, missing


def read_messages(fields: Fields) -> tuple[list[Any], bool]:
    """The conversation as the client sent it, and whether the answer continues its last message.

    It does when that is an assistant's message of text. An empty one at the end, as some clients send it to show
    where the answer goes, is left out.

    Raises:
        RequestError: there are none.
    """
    messages = fields.array("messages")
    if messages is None:
        raise missing("messages")
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or last.get("tool_calls"):
        return messages, False
    if last.get("content") in ("", None, []):
        return messages[:-1], False
    return messages, True
