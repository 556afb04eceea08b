"""One tokenizer's own behaviour, over small vocabularies that have every kind of token."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.portable.vocabularies import (
    BOS,
    BOS_ID,
    EOS,
    IM_END,
    IM_START,
    THINK,
    UNHURRIED,
    byte_level,
    byte_level_metadata,
    sentencepiece,
    wordpiece_metadata,
)
from troth.errors import RequestError
from troth.text.gguf_tokenizer import tokenizer_from_gguf
from troth.text.tokenizer import Tokenizer

BYTES = byte_level()
PIECES = sentencepiece()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
MARKED = st.lists(st.sampled_from([IM_START, IM_END, BOS, THINK, "<s>", "</s>", " ", "a", "hello", "\0", "é"]))


@UNHURRIED
@given(TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte_level", "sentencepiece"])
def test_tokenizer_round_trip_is_exact_for_any_text(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("▁", "_")  # SentencePiece cannot tell it from a space
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False), skip_special=False) == text


@UNHURRIED
@given(MARKED.map("".join))
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte_level", "sentencepiece"])
def test_tokenizer_makes_no_control_token_from_text_that_is_not_parsed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids) == text


def test_tokenizer_reads_control_tokens_by_default() -> None:
    ids = BYTES.encode(f"{IM_START}a{IM_END}", add_special=False)
    assert [BYTES.is_special(token_id) for token_id in ids] == [True, False, True]
    assert BYTES.decode(ids) == "a"
    assert BYTES.decode(ids, skip_special=False) == f"{IM_START}a{IM_END}"


def test_tokenizer_reads_added_tokens_that_are_no_control_tokens_either_way() -> None:
    parsed = BYTES.encode(f"{THINK}a", add_special=False)
    assert len(parsed) == 2
    assert BYTES.encode(f"{THINK}a", add_special=False, parse_special=False) == parsed
    assert BYTES.decode(parsed) == f"{THINK}a"


def test_tokenizer_adds_bos_only_when_the_model_does() -> None:
    with_bos = byte_level(bos=True)
    assert (with_bos.add_bos, BYTES.add_bos, PIECES.add_bos) == (True, False, True)
    assert with_bos.encode("a") == [BOS_ID, *with_bos.encode("a", add_special=False)]
    assert with_bos.encode("a", parse_special=False) == with_bos.encode("a")
    assert BYTES.encode("a") == BYTES.encode("a", add_special=False)


def test_tokenizer_refuses_text_whose_merges_spell_a_control_token() -> None:
    """Nothing but a vocabulary built so can do it; then the promise of parse_special is kept by refusing."""
    metadata = byte_level_metadata(merges=["< s", "<s >"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<s", "<s>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 3]
    metadata["tokenizer.ggml.pre"] = "deepseek-coder"
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.merges": ["< s", "<s >"]})
    assert tokenizer.encode("<s>") == [tokenizer.vocab_size - 1]
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "tekken", "tokenizer.ggml.add_bos_token": False})
    with pytest.raises(RequestError) as caught:
        _one_word(tokenizer).encode("<s>", parse_special=False, param="messages[0].content")
    assert caught.value.param == "messages[0].content"
    assert "'<s>'" in str(caught.value)


def _one_word(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without word splitting, so that merges may cross from sign to letter."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer._encoder.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "😀\ud83d"])
@pytest.mark.parametrize("method", ["encode", "min_num_tokens"])
def test_tokenizer_refuses_half_a_surrogate_pair(method: str, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        getattr(BYTES, method)(text, param="messages[3].content")
    assert caught.value.param == "messages[3].content"


def test_tokenizer_takes_nul_as_text() -> None:
    for tokenizer in (BYTES, PIECES):
        assert tokenizer.decode(tokenizer.encode("a\0b", add_special=False)) == "a\0b"


def test_tokenizer_token_bytes_are_the_raw_bytes() -> None:
    assert BYTES.token_bytes(BOS_ID) == BOS.encode()
    assert b"".join(map(BYTES.token_bytes, BYTES.encode(" hello é"))) == " hello é".encode()
    assert PIECES.token_bytes(3 + 0xE2) == b"\xe2"
    assert [BYTES.token_bytes(token_id) for token_id in (-1, BYTES.vocab_size, 10**9)] == [b"", b"", b""]


def test_tokenizer_decodes_ids_without_token_to_nothing() -> None:
    ids = BYTES.encode("hello")
    assert BYTES.decode([10**6, *ids, -5]) == "hello"


def test_tokenizer_keeps_the_first_space_of_a_continued_text() -> None:
    ids = PIECES.encode("hello", add_special=False)
    assert PIECES.decode(ids) == "hello"
    assert PIECES.decode(ids, at_start=False) == " hello"


def test_tokenizer_names_bos_and_eos() -> None:
    assert (BYTES.bos_token, BYTES.eos_token, BYTES.eos_ids) == (BOS, EOS, frozenset({BOS_ID + 1}))
    assert (PIECES.bos_token, PIECES.eos_token, PIECES.bos_id) == ("<s>", "</s>", 1)


@UNHURRIED
@given(TEXTS, st.integers(1, 40))
@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte_level", "sentencepiece"])
def test_tokenizer_min_num_tokens_is_a_lower_bound(tokenizer: Tokenizer, text: str, times: int) -> None:
    for sample in (text, text * times, "▁" * times, "<0x41>" * times):
        assert tokenizer.min_num_tokens(sample) <= len(tokenizer.encode(sample, add_special=False))


def test_tokenizer_min_num_tokens_grows_with_the_text() -> None:
    for tokenizer in (BYTES, PIECES):
        assert tokenizer.min_num_tokens("hello " * 10_000) >= 60_000 // tokenizer.max_token_bytes


def test_tokenizer_min_num_tokens_counts_composed_text_less() -> None:
    composing = byte_level(normalizer={"type": "NFC"})
    text = "e\u0301" * 3000
    assert 0 < composing.min_num_tokens(text) <= len(composing.encode(text))
    assert composing.min_num_tokens(text) < BYTES.min_num_tokens(text)


def test_tokenizer_min_num_tokens_is_zero_where_text_may_vanish() -> None:
    assert tokenizer_from_gguf(wordpiece_metadata()).min_num_tokens("hello " * 1000) == 0
    assert (
        byte_level(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}).min_num_tokens("a" * 99) == 0
    )


def test_tokenizer_min_num_tokens_leaves_out_space_that_a_token_swallows() -> None:
    greedy = byte_level(added=[{"content": "<|end|>", "special": True, "rstrip": True}])
    text = "<|end|>" + " " * 100_000
    assert greedy.min_num_tokens(text) <= len(greedy.encode(text)) == 1


def test_tokenizer_min_num_tokens_leaves_out_bytes_without_token() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [f"x{t}" if t == "Z" else t for t in metadata["tokenizer.ggml.tokens"]]
    lacking = tokenizer_from_gguf(metadata)
    assert lacking.encode("ZaZ") == lacking.encode("a")
    assert lacking.min_num_tokens("Z" * 100_000) == 0
    assert lacking.min_num_tokens("a" * 100_000) > 0


def test_tokenizer_never_truncates_though_the_file_says_so() -> None:
    assert len(BYTES.encode("x y " * 50)) == 200


@pytest.mark.parametrize(
    ("before", "after", "exact"),
    [
        ("hello world", f"{IM_START}hello", True),
        (f"{IM_START}hello{IM_END}\n", f"{IM_START}", True),
        ("", f"{IM_START}hello", True),
        ("hello", " world", False),
        ("hel", "lo", False),
        ("hello", "", False),
        (f"hello{IM_START[:4]}", IM_START[4:], False),
    ],
)
def test_tokenizer_encode_split_counts_the_ids_before_an_added_token(before: str, after: str, exact: bool) -> None:
    ids, num_before = BYTES.encode_split(before + after, len(before))
    assert ids == BYTES.encode(before + after, add_special=False)
    assert num_before == (len(BYTES.encode(before, add_special=False)) if exact else None)


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"normalized": True}, {"single_word": True}])
def test_tokenizer_encode_split_makes_no_claim_at_tokens_that_look_around(flags: dict[str, Any]) -> None:
    tokenizer = byte_level(added=[{"content": "<|x|>", "special": True, **flags}])
    assert tokenizer.encode_split("hello <|x|>", 6)[1] is None


def test_tokenizer_encodes_the_same_from_many_threads() -> None:
    tokenizer = byte_level(bos=True)
    texts = [f"{IM_START}hello world {i} é{IM_END}" for i in range(200)]
    expected = [(tokenizer.encode(text), tokenizer.encode(text, parse_special=False)) for text in texts]
    fresh = byte_level(bos=True)
    with ThreadPoolExecutor(8) as pool:
        parsed = list(pool.map(fresh.encode, texts))
        plain = list(pool.map(lambda text: fresh.encode(text, parse_special=False), texts))
    assert list(zip(parsed, plain, strict=True)) == expected


def test_tokenizer_import_needs_no_heavy_library() -> None:
    code = "import sys, troth.text.tokenizer, troth.text.detokenize, troth.text.stop, troth.text.defaults;"
    code += "print([name for name in ('tokenizers', 'jinja2', 'torch', 'numpy') if name in sys.modules])"
    source = str(Path(__file__).parents[2] / "src")
    result = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
