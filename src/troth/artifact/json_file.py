"""JSON objects from files nobody vouches for, bounded in bytes, depth and values before they are parsed.

Refuses to know what the keys mean. ``resolve.py`` reads configs through this, ``safetensors.py`` its headers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

from troth.artifact.regular_file import RegularFile
from troth.errors import ModelLoadError

MAX_JSON_BYTES: Final = 64 * 2**20
MAX_JSON_DEPTH: Final = 64
MAX_JSON_VALUES: Final = 2**21
"""A parsed value costs some 60 to 250 bytes; the index of the largest models has 100,000."""

JsonObject = dict[str, Any]

# The closing quote is optional: a string that never ends is then scanned once, not once per quote in it.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_A_BRACKET: Final = bytes(set(range(256)) - set(b"[]{}"))


def read_json_object(path: Path, *, limit_bytes: int = MAX_JSON_BYTES) -> JsonObject:
    """Read a file that holds one JSON object.

    Raises:
        ModelLoadError: as ``parse_json_object``; or the file cannot be read, or is above ``limit_bytes``.
    """
    with RegularFile(path) as file:
        return parse_json_object(file.read_whole(limit_bytes), path)


def parse_json_object(raw: bytes, path: Path, *, field: str = "") -> JsonObject:
    """Parse UTF-8 JSON whose outermost value is an object. ``path`` and ``field`` say where it came from.

    Infinity is accepted although JSON has no such number: Mamba configs write it (time_step_limit).

    Raises:
        ModelLoadError: not UTF-8, not JSON, not an object, a name twice in an object, NaN, or past a bound.
    """

    def unique(pairs: list[tuple[str, Any]]) -> JsonObject:
        members = dict(pairs)
        if len(members) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ModelLoadError(f"the name {twice!r:.80} is there twice", path=str(path), field=field)
        return members

    def constant(word: str) -> float:
        if word == "NaN":
            raise ModelLoadError("holds NaN, which is no number", path=str(path), field=field)
        return float(word)

    excess = _excess(raw)
    if excess is not None:
        raise ModelLoadError(excess, path=str(path), field=field)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except ValueError as error:
        raise ModelLoadError(f"is not JSON: {error}", path=str(path), field=field) from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"holds a {type(value).__name__}, not an object", path=str(path), field=field)
    return value


def _excess(raw: bytes) -> str | None:
    """Which bound the text passes, found without recursion and before a single value is built."""
    bare = _STRING.sub(b"", raw)
    brackets = bare.translate(None, _NOT_A_BRACKET)
    num_values = bare.count(b",") + len(brackets) // 2
    if num_values > MAX_JSON_VALUES:
        return f"holds some {num_values} values; at most {MAX_JSON_VALUES} are read here"
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:
            return f"is nested more than {MAX_JSON_DEPTH} levels deep"
    return None
