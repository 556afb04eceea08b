"""Text -> option values, the same for flags and environment variables.

Refuses to know where the text comes from: every function raises ValueError with what a value must be, and the caller
names the place. Read next: ``env.py``, ``cli/flags.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

MAX_PORT: Final = 65535
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
_ORIGIN: Final = re.compile(
    r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^/?#@*:\s\[\]]+)(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE
)
_SIZE_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Reads a whole number from ``low`` to ``high``; None: no upper bound."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def read(text: str) -> int:
        # int() also takes 1_000, a sign, spaces and the digits of every script.
        value = int(text) if text.isascii() and text.removeprefix("-").isdigit() else None
        if value is None or value < low or (high is not None and value > high):
            raise ValueError(f"must be {wanted}, not {text!r}")
        return value

    return read


def some_text(text: str) -> str:
    """Any text but the empty one."""
    if not text:
        raise ValueError("must not be empty")
    return text


def number(text: str) -> float:
    """A finite decimal number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"must be a number, not {text!r}")
    return value


def seconds(text: str) -> float:
    """A time above zero."""
    value = number(text)
    if value <= 0:
        raise ValueError(f"must be a number of seconds above 0, not {text!r}")
    return value


def size_bytes(text: str) -> int:
    """Bytes, or a number with a binary unit: 1500000, 512M, 1.5GiB."""
    match = _SIZE.fullmatch(text.strip())
    value = int(float(match[1]) * 1024 ** _SIZE_POWER[match[2].lower()]) if match else 0
    if value < 1:
        raise ValueError(f"must be a size such as 512M or 4G, not {text!r}")
    return value


def one_of(*choices: str) -> Callable[[str], str]:
    """Reads one of a few words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {text!r}")
        return text

    return read


def words(text: str) -> tuple[str, ...]:
    """Words between commas; at least one, none of them empty."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ValueError(f"must be words between commas, not {text!r}")
    return parts


def origin(text: str) -> str:
    """What browsers send as Origin: scheme, host and port, without a path; ``*`` stands for all, ``null`` for none."""
    if text in ("*", "null", "file://"):
        return text
    found = _ORIGIN.fullmatch(text)
    if found is None or int((found[2] or ":0")[1:]) > MAX_PORT:
        raise ValueError(
            f"must be an origin such as http://localhost:3000 (no path, no / at its end), or *, not {text!r}"
        )
    return text.lower()


def name_pair(text: str) -> tuple[str, str]:
    """``REQUESTED=SERVED``."""
    left, equals, right = text.partition("=")
    if not (left and equals and right):
        raise ValueError(f"must be REQUESTED=SERVED, not {text!r}")
    return left, right
