"""Owns the text of one stream of token ids: whole characters only, and in the end exactly the whole decode.

Knows no request and no stop string. Read next: ``tokenizer.py`` (the whole decode), ``stop.py`` (what follows).
"""

from __future__ import annotations

import codecs
from typing import Protocol

_Utf8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What a stream needs of a tokenizer."""

    @property
    def drops_first_space(self) -> bool:
        """Whether a space at the very start of a text is not part of it."""

    def shown_bytes(self, token_id: int, skip_special: bool) -> bytes:
        """The bytes a reader sees of one id."""

    def is_special(self, token_id: int) -> bool:
        """Whether one id is a control token."""


class Detokenizer:
    """Turns the ids of one answer into text as they come.

    The law: joining all pushes and the flush gives ``Tokenizer.decode`` of all ids with the same switches. At most
    three bytes, the beginning of one character, are withheld at any time; bytes that cannot become a character are
    released as U+FFFD at once.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special: bool = True, at_start: bool = True) -> None:
        """``skip_special`` hides control tokens. ``at_start`` False: the ids continue a text, so that the space
        before a first SentencePiece word is kept.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = _Utf8("replace")
        self._drop_space = at_start and tokenizer.drops_first_space

    def push(self, token_id: int) -> str:
        """The text that is certain after one more id; often empty, never half a character."""
        return self._shown(self._utf8.decode(self._tokenizer.shown_bytes(token_id, self._skip_special)))

    def flush(self) -> str:
        """The text of what was withheld, at the end of the stream."""
        return self._shown(self._utf8.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
