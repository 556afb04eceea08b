"""Owns what the ids of one model stand for: the bytes of every token, control tokens, begin and end of a text.

Knows nothing about how text becomes ids, nor about the files a vocabulary comes from.
Read next: ``tokenizer.py`` (uses it), ``tokenizer_json.py`` and ``gguf_tokenizer.py`` (fill it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

END_OF_TURN: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|end_of_turn|>",
    "<|END_OF_TURN_TOKEN|>",
)
"""Control tokens that close an assistant turn in the templates of the open families."""

WORD_MARK: Final = "\u2581"
"""SentencePiece writes a space inside a token as this character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ids of one model. Bytes are worked out when asked for: a table of 262,144 tokens takes half a second."""

    num_ids: int
    """Ids below this may have a token."""
    text_of: Callable[[int], str | None]
    """The token of an id as the vocabulary spells it; None for an id without one."""
    to_bytes: Callable[[str], bytes]
    """What an ordinary token's spelling stands for."""
    special_ids: frozenset[int]
    """Control tokens: hidden when an answer is shown, and never made from text that is not to be parsed."""
    unknown_id: int | None = None
    """The id that stands for text the vocabulary cannot spell; special, but made from any text."""
    bos_id: int | None = None
    eos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    """Every id that ends an answer, ``eos_id`` among them."""
    drops_first_space: bool = False
    """SentencePiece with a space prefix: the first character of a decoded text, if a space, is not part of it."""

    def bytes_of(self, token_id: int) -> bytes:
        """The raw bytes of one id: its own text for a control token, nothing for an id without a token."""
        text = self.text_of(token_id) if 0 <= token_id < self.num_ids else None
        if text is None:
            return b""
        return text.encode() if token_id in self.special_ids else self.to_bytes(text)


def _byte_alphabet() -> dict[int, int]:
    """Character -> byte of the byte-level alphabet (Radford et al. 2019, GPT-2 ``encoder.py``).

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards, in order. Those 68
    characters themselves map above Latin-1, so that encoding to Latin-1 fails on a token that holds one.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    outside = dict.fromkeys(others, 0x10FFFF)
    return outside | {0x100 + index: byte for index, byte in enumerate(others)}


_ALPHABET: Final = _byte_alphabet()
_BYTE_TOKENS: Final = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level BPE token; a token written outside the alphabet stands for its own text."""
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token: ``<0xE2>`` is one byte, the word mark is a space."""
    return _BYTE_TOKENS.get(token) or token.replace(WORD_MARK, " ").encode()


def wordpiece_bytes(token: str) -> bytes:
    """The bytes of a WordPiece token: a continuation loses its mark, a word gains the space before it."""
    return token[2:].encode() if token.startswith("##") else b" " + token.encode()


def end_ids(declared: Iterable[int], control: Mapping[str, int], template: str | None, num_ids: int) -> frozenset[int]:
    """Every id that ends an answer.

    ``declared`` are the ids the model's files name; ``control`` maps the text of its control tokens to ids. An
    end-of-turn token counts only when the chat template writes it. A vocabulary that has ``<|return|>`` uses
    ``<|end|>`` between the messages of one answer (the harmony format), so there it does not end it.
    """
    ids = {token_id for token_id in declared if 0 <= token_id < num_ids}
    for token in END_OF_TURN:
        if token in control and template is not None and token in template:
            ids.add(control[token])
    if "<|return|>" in control:
        ids.discard(control.get("<|end|>", -1))
    return frozenset(ids)
