"""Log-probabilities in the two shapes of the OpenAI API.

Refuses to know where the numbers come from. An entry is made for every emitted token, the one that ended the answer
included, so entries and ``completion_tokens`` agree. Read next: ``openai_chat.py``, ``openai_completions.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from troth.contracts.events import TokenText
from troth.contracts.plan import TokenLogprobs
from troth.serve.model import Tokenizer

_FLOOR: Final = -9999.0
"""Stands for minus infinity, which JSON lacks (as in the OpenAI API)."""


def token_name(data: bytes) -> str:
    """A token as text; ``bytes:\\xe2\\x82`` when its bytes alone are no text, so that tokens keep distinct names."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entries(tokens: Iterable[TokenText], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Entries of ``choices[].logprobs.content``."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": token_name(data), "logprob": max(logprob, _FLOOR), "bytes": list(data)}

    return [
        {
            **entry(token.token_id, token.logprobs.logprob),
            "top_logprobs": [
                entry(top_id, logprob)
                for top_id, logprob in zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
            ],
        }
        for token in tokens
        if token.logprobs is not None
    ]


class LegacyLogprobs:
    """Builds ``choices[].logprobs`` of one legacy completion, piece by piece.

    ``text_offset`` is the character of ``text`` (the echoed prompt included) where a token begins; a token that
    begins inside a character has the offset of that character, a control token that of what follows it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_begun = 0
        """Characters begun by the tokens so far."""

    def prompt(
        self, prompt_ids: Iterable[int], logprobs: Iterable[TokenLogprobs], num_top: int
    ) -> dict[str, list[Any]]:
        """The echoed prompt; nothing is known about its first token."""
        entries: list[TokenLogprobs | None] = [None, *logprobs]
        return self._pieces(zip(prompt_ids, entries, strict=True), num_top)

    def answer(self, tokens: Iterable[TokenText], num_top: int) -> dict[str, list[Any]]:
        """Tokens of the answer."""
        return self._pieces(((token.token_id, token.logprobs) for token in tokens), num_top)

    def _pieces(self, tokens: Iterable[tuple[int, TokenLogprobs | None]], num_top: int) -> dict[str, Any]:
        pieces: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, entry in tokens:
            data = self._tokenizer.token_bytes(token_id)
            pieces["tokens"].append(token_name(data))
            if self._tokenizer.is_special(token_id):
                data = b""
            inside = bool(data) and data[0] & 0xC0 == 0x80
            pieces["text_offset"].append(max(0, self._num_begun - inside))
            pieces["token_logprobs"].append(None if entry is None else max(entry.logprob, _FLOOR))
            pieces["top_logprobs"].append(self._top(entry, num_top))
            self._num_begun += sum(byte & 0xC0 != 0x80 for byte in data)
        return pieces

    def _top(self, entry: TokenLogprobs | None, num_top: int) -> dict[str, float] | None:
        """The most likely tokens by name, and the token itself."""
        if entry is None or num_top == 0:
            return None
        top = dict(zip(entry.top_ids, entry.top_logprobs, strict=True)) | {entry.token_id: entry.logprob}
        return {
            token_name(self._tokenizer.token_bytes(token_id)): max(logprob, _FLOOR) for token_id, logprob in top.items()
        }
