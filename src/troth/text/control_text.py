"""Owns the guard between what people say and what controls the model: control tokens spelled in messages stay text.

Each spelling is broken by a mark before the template renders it, so the render holds no control token but those of the
template; the tokenizer takes the marks out again and writes those places in ordinary tokens. Knows no template, no ids.
Read next: ``tokenizer.py`` (``encode_guarded``), ``prompt.py`` (marks and encodes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

MARK: Final = "\ue0c8\ue0aa\ue0c8"
"""Private-use characters that no client has reason to send; where one does, they are dropped."""

# A template that writes JSON in ASCII, or a Python literal, escapes them.
MARKS: Final = re.compile(re.escape(MARK) + "|" + re.escape(MARK.encode("ascii", "backslashreplace").decode()))


def without_marks(text: str) -> str:
    """``text`` as it was before it was marked."""
    return MARKS.sub("", text)


class ControlGuard:
    """Marks the spellings of one vocabulary's control tokens."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        texts = sorted((text for text in control_texts if len(text) > 1), key=len, reverse=True)
        self._broken: Final = {text: text[0] + MARK + text[1:] for text in texts}
        self._firsts: Final = {text[0] for text in texts}

    def mark(self, value: Any) -> Any:
        """A copy of a JSON value with every spelling marked, in keys too. Linear in its length, whatever it holds."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
            return [self.mark(item) for item in value]
        return value

    def _mark(self, text: str) -> str:
        if any(first in text for first in self._firsts):
            for spelling, broken in self._broken.items():
                text = text.replace(spelling, broken)
        return text
