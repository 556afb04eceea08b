"""The law of the stream: whatever the ids, the pieces join to the whole decode, and no piece holds half a character."""

from __future__ import annotations

import gzip
import tempfile
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.portable.vocabularies import BOS_ID, UNHURRIED, byte_level, sentencepiece
from tests.shared_data import shared
from troth.artifact.gguf import read_gguf
from troth.text.detokenize import Detokenizer
from troth.text.gguf_tokenizer import tokenizer_from_gguf
from troth.text.tokenizer import Tokenizer
from troth.text.tokenizer_json import tokenizer_from_json

SMALL = {
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece(),
    "no_prefix": sentencepiece(add_space_prefix=False),
}
SWITCHES = st.fixed_dictionaries({"skip_special": st.booleans(), "at_start": st.booleans()})


def streamed(tokenizer: Tokenizer, ids: list[int], **switches: bool) -> list[str]:
    stream = Detokenizer(tokenizer, **switches)
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


@UNHURRIED
@given(st.data(), SWITCHES)
@pytest.mark.parametrize("name", SMALL)
def test_detokenize_stream_equals_whole_for_any_ids(name: str, data: st.DataObject, switches: dict[str, bool]) -> None:
    tokenizer = SMALL[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    pieces = streamed(tokenizer, ids, **switches)
    assert "".join(pieces) == tokenizer.decode(ids, **switches)


@UNHURRIED
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_detokenize_never_emits_half_a_character(text: str) -> None:
    """Byte by byte, where every cut that can happen does."""
    tokenizer = SMALL["byte_level"]
    ids = list(text.encode())
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert all(len(piece) <= 1 for piece in pieces)


@UNHURRIED
@given(st.binary(max_size=24))
def test_detokenize_withholds_at_most_three_bytes(data: bytes) -> None:
    tokenizer = SMALL["byte_level"]
    stream = Detokenizer(tokenizer)
    shown = ""
    for count, byte in enumerate(data, start=1):
        shown += stream.push(byte)
        assert any(data[: count - held].decode("utf-8", "replace") == shown for held in range(4))
    assert shown + stream.flush() == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\xff", ["\ufffd", ""]),
        (b"\xe2\x82", ["", "", "\ufffd"]),
        (b"\xe2\x82A", ["", "", "\ufffdA", ""]),
        (b"\xf0\x9f\x98\x80", ["", "", "", "😀", ""]),
        (b"\xc0\xaf", ["\ufffd", "\ufffd", ""]),
    ],
    ids=["impossible", "cut", "interrupted", "whole", "overlong"],
)
def test_detokenize_marks_bytes_that_are_no_character(data: bytes, pieces: list[str]) -> None:
    assert streamed(SMALL["byte_level"], list(data)) == pieces


def test_detokenize_drops_one_space_before_the_first_word_only() -> None:
    tokenizer = SMALL["sentencepiece"]
    ids = tokenizer.encode("hello hello", add_special=False)
    assert "".join(streamed(tokenizer, ids)) == "hello hello"
    assert "".join(streamed(tokenizer, ids, at_start=False)) == " hello hello"
    assert "".join(streamed(tokenizer, [1, *ids])) == "hello hello"
    assert "".join(streamed(tokenizer, [1, *ids], skip_special=False)) == "<s> hello hello"


def test_detokenize_joins_a_character_across_a_hidden_control_token() -> None:
    tokenizer = SMALL["byte_level"]
    ids = [0xC3, BOS_ID, 0xA9]
    assert streamed(tokenizer, ids) == ["", "", "é", ""]
    assert "".join(streamed(tokenizer, ids, skip_special=False)) == "\ufffd<|bos|>\ufffd"


@cache
def published(name: str) -> Tokenizer:
    if not name.endswith(".gguf"):
        return tokenizer_from_json(gzip.decompress(shared(f"tokenizers/{name}/tokenizer.json.gz").read_bytes()))
    packed = shared(f"gguf_vocab/ggml-vocab-{name}.gz")
    with tempfile.NamedTemporaryFile() as file:
        file.write(gzip.decompress(packed.read_bytes()))
        file.flush()
        return tokenizer_from_gguf(read_gguf(file.name).metadata)


@UNHURRIED
@given(st.data(), SWITCHES)
@pytest.mark.parametrize("name", ["qwen3", "llama-spm.gguf", "falcon.gguf"])
def test_detokenize_stream_equals_whole_on_published_vocabularies(
    name: str, data: st.DataObject, switches: dict[str, bool]
) -> None:
    tokenizer = published(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size) | st.integers(0, 300), max_size=40))
    assert "".join(streamed(tokenizer, ids, **switches)) == tokenizer.decode(ids, **switches)
