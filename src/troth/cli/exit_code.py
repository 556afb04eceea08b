"""What the process answers to the shell."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
FAILED: Final = 1
"""It failed, or the answer is no."""
USER_ERROR: Final = 2
"""The user must change something: a flag, a path, the request."""
INTERRUPTED: Final = 130
"""Ctrl-C: 128 + SIGINT."""
OUTPUT_GONE: Final = 141
"""Nobody reads standard output any more: 128 + SIGPIPE."""
