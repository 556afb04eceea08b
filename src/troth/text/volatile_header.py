"""Header lines that clients put before a system prompt, with a value that changes in every request.

Left alone, no two prompts of such a client begin alike, and the prompt cache never hits. Known: Claude Code's billing
line, ``x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=0f3a1;``. Refuses to know templates.
Used by ``prompt.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

_NUM_LINES: Final = 4
"""Of the first message: further down a line is text that somebody wrote."""
_HEADER: Final = re.compile(r"\s{0,8}x-[a-z0-9-]{1,64}-header:", re.ASCII | re.IGNORECASE)
_VALUE: Final = re.compile(r"\b(cch=)[0-9A-Za-z]{1,64}", re.ASCII)
_ROLES: Final = ("system", "developer")


def without_volatile_values(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with a zero for the values that change in header lines at the start of the system prompt.

    Args:
        messages: normalised; not changed.
    """
    first = messages[0]
    if first["role"] not in _ROLES:
        return list(messages)
    lines = first["content"].split("\n", _NUM_LINES)
    steady = [_VALUE.sub(r"\g<1>0", line) if _HEADER.match(line) else line for line in lines[:_NUM_LINES]]
    return [{**first, "content": "\n".join([*steady, *lines[_NUM_LINES:]])}, *messages[1:]]
