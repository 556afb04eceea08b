"""Small vocabularies of this project's own, in both forms a model may bring: tokenizer.json and GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import settings

from troth.text.gguf_tokenizer import tokenizer_from_gguf
from troth.text.tokenizer import Tokenizer
from troth.text.tokenizer_json import tokenizer_from_json

UNHURRIED = settings(deadline=None)
"""Loading a vocabulary and a busy machine both take their time; neither is what these tests are about."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BOS, EOS, IM_START, IM_END, THINK = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<think>"


def byte_symbols() -> list[str]:
    """The character of each byte in the byte-level alphabet, spelled from its definition."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


MERGES = [("Ġ", "h"), ("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("Ġ", "w"), ("Ġ", "Ġ")]


def byte_level_json(
    *, added: Sequence[Mapping[str, Any]] = (), merges: Sequence[tuple[str, str]] = MERGES, **parts: Any
) -> bytes:
    """A tokenizer.json: 256 bytes, a few merges, then the added tokens with the ids that follow."""
    tokens = [*byte_symbols(), *("".join(merge) for merge in merges)]
    special = (BOS, EOS, IM_START, IM_END)
    own = [{"content": token, "special": True} for token in special] + [{"content": THINK, "special": False}, *added]
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    data: dict[str, Any] = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [{"id": len(tokens) + i, **defaults, **token} for i, token in enumerate(own)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(merge) for merge in merges],
        },
    }
    return json.dumps(data | parts).encode()


def bos_processor(token_id: int) -> dict[str, Any]:
    """A post-processor that puts BOS before every text."""
    special = {"SpecialToken": {"id": BOS, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [token_id], "tokens": [BOS]}},
    }


BOS_ID = 256 + len(MERGES)


def byte_level(*, bos: bool = False, template: str | None = None, **parts: Any) -> Tokenizer:
    """A byte-level tokenizer with ChatML's control tokens."""
    if bos:
        parts["post_processor"] = bos_processor(BOS_ID)
    names = {"bos_token": BOS, "eos_token": {"content": EOS}, "unk_token": None}
    return tokenizer_from_json(byte_level_json(**parts), names=names, template=template)


WORDS = [
    *("▁hello", "▁world", "▁the", "lo", "ello", "hello", "wo", "rld", "▁w", "▁h"),
    *("he", "ll", "llo", "▁wo", "or", "ld", "▁t", "th"),
]


def sentencepiece_metadata(**changed: Any) -> dict[str, Any]:
    """GGUF metadata of a scored vocabulary; keys are given without their prefix, None removes one."""
    letters = [*"abcdefghijklmnopqrstuvwxyz ".replace(" ", "▁"), *".,!é"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        *WORDS,
        "<|im_end|>",
        "[A]",
    ]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(letters) + len(WORDS)), CONTROL, USER_DEFINED]
    scores = (
        [0.0] * 259 + [-100.0 - i for i in range(len(letters))] + [-1.0 - i for i in range(len(WORDS))] + [0.0, 0.0]
    )
    values: dict[str, Any] = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores}
    return _prefixed(values | changed)


def byte_level_metadata(**changed: Any) -> dict[str, Any]:
    """GGUF metadata of the byte-level vocabulary above."""
    tokens = [*byte_symbols(), *("".join(merge) for merge in MERGES), BOS, EOS, IM_START, IM_END, THINK]
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": [NORMAL] * BOS_ID + [CONTROL] * 4 + [USER_DEFINED],
        "merges": [" ".join(merge) for merge in MERGES],
        "bos_token_id": BOS_ID,
        "eos_token_id": BOS_ID + 1,
    }
    return _prefixed(values | changed)


def wordpiece_metadata(**changed: Any) -> dict[str, Any]:
    """GGUF metadata of a BERT vocabulary."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hello", "▁wor", "ld", "▁,", "▁a"]
    values: dict[str, Any] = {
        "model": "bert",
        "tokens": tokens,
        "token_type": [CONTROL] * 4 + [NORMAL] * 5,
        "unknown_token_id": 1,
        "cls_token_id": 2,
        "seperator_token_id": 3,
    }
    return _prefixed(values | changed)


def sentencepiece(template: str | None = None, **changed: Any) -> Tokenizer:
    """The scored tokenizer."""
    return tokenizer_from_gguf(sentencepiece_metadata(**changed), template=template)


def _prefixed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None}
