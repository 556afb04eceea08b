"""The ``messages`` of a request body, and whether their last one is to be continued.

Refuses to know the form of a message: ``text/messages.py`` checks it, for every API. Read next: ``openai_chat.py``.
"""

from __future__ import annotations

from typing import Any

from troth.serve.fields import Fields, missing
from troth.text.messages import split_continued


def read_messages(fields: Fields) -> tuple[list[Any], bool]:
    """The conversation as the client sent it, and whether the answer continues its last message (``split_continued``).

    Raises:
        RequestError: there are none.
    """
    messages = fields.array("messages")
    if messages is None:
        raise missing("messages")
    shown, continues = split_continued(messages)
    return list(shown), continues
