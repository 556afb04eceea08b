"""A tokenizer and a prompt builder that need no files: one token per byte, one line per message.

Shipped so that code that talks to an engine can be tested without a model. Read next: ``fake_engine.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from troth.errors import ContextExceeded, RequestError
from troth.text.messages import normalise_messages

EOS_ID: Final = 256
EOS_TEXT: Final = b"<end>"


class ByteTokenizer:
    """Token ids 0..255 are the bytes of UTF-8, 256 ends an answer."""

    vocab_size: Final = 257
    eos_ids: Final = frozenset({EOS_ID})
    drops_first_space: Final = False

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The bytes of ``text``; there are no tokens around it, and none that text could spell."""
        return list(text.encode())

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ``token_ids``; bytes that are no UTF-8 become U+FFFD."""
        shown = (one for one in token_ids if not (skip_special and self.is_special(one)))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The byte of a token; the end's own text."""
        return bytes([token_id]) if token_id < EOS_ID else EOS_TEXT

    def shown_bytes(self, token_id: int, skip_special: bool) -> bytes:
        """The bytes a reader sees of one token."""
        return b"" if skip_special and self.is_special(token_id) else self.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is the end."""
        return token_id >= EOS_ID


@dataclass(frozen=True, slots=True)
class BytePrompt:
    """A prompt as text and as token ids; ``boundary`` is its length without the generation prompt."""

    text: str
    ids: tuple[int, ...]
    boundary: int | None = None
    continues_text: bool = False
    checkpoint_positions: tuple[int, ...] = ()


class BytePrompts:
    """Builds prompts over ByteTokenizer: ``role: content`` per message, then ``assistant: `` for the answer.

    Args:
        context_tokens: prompts that leave no room for a token raise ContextExceeded; None: no limit.
    """

    def __init__(self, context_tokens: int | None = None) -> None:
        self._context_tokens = context_tokens
        self._tokenizer = ByteTokenizer()

    def chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> BytePrompt:
        """Render a conversation. Template variables come first, as ``name=value`` lines, then the names of tools."""
        declared = {"tools": " ".join(tool["function"]["name"] for tool in tools)} if tools else {}
        head = "".join(f"{name}={value}\n" for name, value in [*(variables or {}).items(), *declared.items()])
        text = head + "\n".join(f"{message['role']}: {message['content']}" for message in normalise_messages(messages))
        if continue_final:
            return self._prompt(text, None)
        history = text + "\n"
        return self._prompt(history + "assistant: ", len(self._tokenizer.encode(history)))

    def completion(self, text: str) -> BytePrompt:
        """The text as it is."""
        return self._prompt(text, None)

    def token_ids(self, ids: Sequence[int]) -> BytePrompt:
        """Token ids as they are. Raises RequestError for one outside the vocabulary."""
        for token_id in ids:
            if not 0 <= token_id < ByteTokenizer.vocab_size:
                raise RequestError(f"token id {token_id} is not in 0..{ByteTokenizer.vocab_size - 1}", param="prompt")
        return BytePrompt("", tuple(ids))

    def _prompt(self, text: str, boundary: int | None) -> BytePrompt:
        ids = tuple(self._tokenizer.encode(text))
        if self._context_tokens is not None and len(ids) >= self._context_tokens:
            raise ContextExceeded(num_prompt_tokens=len(ids), max_tokens=1, limit=self._context_tokens)
        return BytePrompt(text, ids, boundary)
