"""GGUF metadata: small vocabularies of every model, what is refused, and llama.cpp's vectors for published ones."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.portable.vocabularies import (
    BOS,
    BOS_ID,
    BYTE,
    NORMAL,
    UNHURRIED,
    byte_level,
    byte_level_metadata,
    sentencepiece,
    sentencepiece_metadata,
    wordpiece_metadata,
)
from tests.shared_data import shared
from troth.artifact.gguf import read_gguf
from troth.errors import ModelLoadError
from troth.text.gguf_tokenizer import merges_from_scores, tokenizer_from_gguf
from troth.text.pretokenizers import PRETOKENIZERS
from troth.text.tokenizer import Tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
VOCABULARIES = (
    "bert-bge",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)


@pytest.fixture(scope="module", params=VOCABULARIES)
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Tokenizer]]:
    packed = shared(f"gguf_vocab/ggml-vocab-{request.param}.gguf.gz")
    path = tmp_path_factory.mktemp("vocab") / f"{request.param}.gguf"
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    yield request.param, tokenizer_from_gguf(read_gguf(path).metadata, str(path))
    path.unlink()


def vectors(name: str) -> Iterator[tuple[str, list[int]]]:
    """Text and ids; the last text has no line of ids when it is empty."""
    base = shared("gguf_vocab")
    texts = (base / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = (base / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    assert len(lines) == len(texts) - (texts[-1] == "")
    yield from zip(texts, ([int(part) for part in line.split()] for line in lines), strict=False)


def test_tokenizer_gguf_published_vectors_come_out_equal(published: tuple[str, Tokenizer]) -> None:
    name, tokenizer = published
    for text, ids in vectors(name):
        assert tokenizer.encode(text, add_special=False, parse_special=False) == ids, text
        assert tokenizer.min_num_tokens(text) <= len(ids)
        if name != "bert-bge":  # WordPiece forgets case, accents and white space
            assert tokenizer.decode(ids) == text


def test_tokenizer_gguf_published_control_tokens_are_spelled_when_not_parsed(published: tuple[str, Tokenizer]) -> None:
    name, tokenizer = published
    control = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    for token_id in control[:100]:
        text = tokenizer.decode([token_id], skip_special=False)
        assert tokenizer.encode(text, add_special=False) == [token_id], text
        if name != "bert-bge":  # [UNK] is what it makes of anything it does not know
            ids = tokenizer.encode(text, add_special=False, parse_special=False)
            assert not any(map(tokenizer.is_special, ids)), text


@pytest.mark.parametrize("pre", PRETOKENIZERS)
def test_tokenizer_gguf_every_pretokenizer_keeps_all_text(pre: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre=pre, add_bos_token=False))
    text = "Hello  World's 1234567 \n\n\t  x ÄÖ́ 漢字かな 한글 :-) don't I'LL ...\r\n ſ ǅ  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_gguf_byte_level_equals_the_json_form() -> None:
    gguf, text = tokenizer_from_gguf(byte_level_metadata(pre="gpt-2")), "hello  world <|im_start|>hello é\n"
    assert gguf.encode(text) == byte_level().encode(text)


def test_tokenizer_gguf_adds_bos_and_eos_as_the_file_says() -> None:
    plain = tokenizer_from_gguf(byte_level_metadata())
    both = tokenizer_from_gguf(byte_level_metadata(add_bos_token=True, add_eos_token=True))
    only_eos = tokenizer_from_gguf(byte_level_metadata(add_eos_token=True))
    assert plain.encode("a") == [97 + 0]
    assert both.encode("a") == [BOS_ID, 97, BOS_ID + 1]
    assert only_eos.encode("a") == [97, BOS_ID + 1]
    assert (plain.add_bos, both.add_bos, only_eos.add_bos) == (False, True, False)
    assert tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe")).encode("a") == [BOS_ID, 97]
    assert tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe", bos_token_id=None)).encode("a") == [97]


def test_tokenizer_gguf_eos_ids_are_those_of_the_file_and_the_template() -> None:
    metadata = byte_level_metadata(eot_token_id=BOS_ID + 3, eom_token_id=BOS_ID + 2)
    assert tokenizer_from_gguf(metadata).eos_ids == {BOS_ID + 1, BOS_ID + 2, BOS_ID + 3}
    metadata = byte_level_metadata(eos_token_id=None) | {"tokenizer.chat_template": "<|im_end|>"}
    assert tokenizer_from_gguf(metadata).eos_ids == {BOS_ID + 3}
    assert tokenizer_from_gguf(metadata, template="other").eos_ids == frozenset()
    assert tokenizer_from_gguf(metadata | {"tokenizer.chat_template": 3}).eos_ids == frozenset()


def test_tokenizer_gguf_ids_outside_the_vocabulary_count_as_absent() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(bos_token_id=10**6, eos_token_id=10**6))
    assert (tokenizer.bos_id, tokenizer.eos_token, tokenizer.eos_ids) == (None, None, frozenset())


def test_tokenizer_gguf_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = sentencepiece()
    spelled = [tokenizer.decode([i], at_start=False) for i in tokenizer.encode("hello world", add_special=False)]
    assert spelled == [" hello", " world"]
    assert tokenizer.encode("Z", add_special=False)[-1] == 3 + ord("Z")


def test_tokenizer_gguf_sentencepiece_prefixes_a_space_after_every_control_token() -> None:
    tokenizer = sentencepiece()
    hello = tokenizer.encode("hello", add_special=False)
    assert tokenizer.encode("<s>hello</s>hello", add_special=False) == [1, *hello, 2, *hello]
    bare = sentencepiece(add_space_prefix=False)
    assert bare.encode("hello", add_special=False) != hello
    assert bare.encode(" hello", add_special=False) == hello
    assert bare.decode(hello) == " hello"


def test_tokenizer_gguf_gemma4_merges_by_rule_over_spaces() -> None:
    metadata = sentencepiece_metadata(model="gemma4", merges=["▁ w", "l l", "h e"], bos_token_id=1, eos_token_id=2)
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("we hell ww")
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "we hell ww"
    assert " w" in [tokenizer.decode([token_id]) for token_id in ids]


def test_tokenizer_gguf_phi3_control_tokens_swallow_the_space_after_them() -> None:
    metadata = sentencepiece_metadata()
    phi3 = tokenizer_from_gguf(metadata | {"general.architecture": "phi3"})
    text = "<|im_end|>\n hello"
    assert len(phi3.encode(text)) < len(tokenizer_from_gguf(metadata).encode(text))
    assert phi3.encode("<s> hello")[1:] == sentencepiece().encode("<s> hello")[1:]


def test_tokenizer_gguf_wordpiece_reads_words_and_continuations() -> None:
    tokenizer = tokenizer_from_gguf(wordpiece_metadata())
    assert tokenizer.encode("Hello, WORLD zzz") == [2, 4, 7, 5, 6, 1, 3]
    assert tokenizer.decode([2, 4, 7, 5, 6, 3]) == "hello , world"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.add_bos) == ("[CLS]", "[SEP]", True)


def test_tokenizer_gguf_takes_a_vocabulary_without_kinds_as_normal() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(token_type=None))
    assert not any(map(tokenizer.is_special, range(tokenizer.vocab_size)))
    assert len(tokenizer.encode(BOS)) > 1


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"model": "t5"}, "model"),
        ({"model": None}, "model"),
        ({"tokens": None}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": ["a", 3]}, "tokens"),
        ({"token_type": [1, 2]}, "token_type"),
        ({"token_type": ["x"]}, "token_type"),
        ({"pre": "no-such"}, "pre"),
        ({"pre": None}, "pre"),
        ({"merges": None}, "merges"),
        ({"merges": ["ab"]}, "merges"),
        ({"merges": ["a zz"]}, "merges"),
        ({"merges": [3]}, "merges"),
        ({"add_bos_token": "yes"}, "add_bos_token"),
        ({"bos_token_id": "1"}, "bos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
    ],
    ids=str,
)
def test_tokenizer_gguf_names_the_key_it_refuses(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        tokenizer_from_gguf(byte_level_metadata(**changed), "m.gguf")
    assert (caught.value.path, caught.value.field) == ("m.gguf", f"tokenizer.ggml.{field}")


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"scores": None}, "scores"),
        ({"scores": [0.0]}, "scores"),
        ({"scores": [0.0] * len(sentencepiece_metadata()["tokenizer.ggml.tokens"])}, "scores"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ],
    ids=["absent", "short", "equal", "whitespace"],
)
def test_tokenizer_gguf_sentencepiece_names_the_key_it_refuses(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        sentencepiece(**changed)
    assert caught.value.field == f"tokenizer.ggml.{field}"


@pytest.mark.parametrize(
    ("token", "told"), [("a" * 20_000, "splitting"), ("a" * 2**24, "characters")], ids=["one_splits", "all_build"]
)
def test_tokenizer_gguf_refuses_tokens_that_would_take_minutes(token: str, told: str) -> None:
    """Splitting one of a megabyte at every character took hours."""
    plain = sentencepiece_metadata()
    tokens, kinds, scores = (plain[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    longer = sentencepiece_metadata(tokens=[*tokens, token], token_type=[*kinds, NORMAL], scores=[*scores, -1e9])
    with pytest.raises(ModelLoadError, match=told) as caught:
        tokenizer_from_gguf(longer)
    assert caught.value.field == "tokenizer.ggml.tokens"


def test_tokenizer_gguf_wordpiece_without_unknown_token_is_refused() -> None:
    with pytest.raises(ModelLoadError) as caught:
        tokenizer_from_gguf(wordpiece_metadata(unknown_token_id=99))
    assert caught.value.field == "tokenizer.ggml.unknown_token_id"


def test_tokenizer_gguf_unknown_pretokenizer_is_named() -> None:
    with pytest.raises(ModelLoadError, match=r"'no-such' is not known.*qwen2"):
        tokenizer_from_gguf(byte_level_metadata(pre="no-such"))


def by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's merging as it is defined: join the best pair, the leftmost of equals, until there is none."""
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@st.composite
def scored_vocabularies(draw: st.DrawFn) -> dict[str, float]:
    """Tokens over three letters with scores in any order: parts may score worse than what they make."""
    tokens = draw(st.lists(st.text("abc", min_size=2, max_size=7), unique=True, max_size=40))
    scores = draw(st.permutations([float(-i) for i in range(len(tokens))]))
    return dict(zip(tokens, scores, strict=True))


@UNHURRIED
@given(scored_vocabularies(), st.text("abc", max_size=30))
def test_merges_from_scores_equal_the_score_driven_merging(words: dict[str, float], text: str) -> None:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abc", *words]
    kinds = [3, *[BYTE] * 256, *[NORMAL] * (3 + len(words))]
    scores = [0.0] * 257 + [-1e9, -2e9, -3e9] + list(words.values())
    from tokenizers import Tokenizer as Encoder
    from tokenizers.models import BPE

    ids = {token: i for i, token in enumerate(tokens)}
    encoder = Encoder(BPE(ids, merges_from_scores(tokens, kinds, scores)))
    assert encoder.encode(text).tokens == by_score(text, words)


def test_tokenizer_gguf_sentencepiece_of_a_published_vocabulary_equals_score_driven_merging(tmp_path: Path) -> None:
    packed = shared("gguf_vocab/ggml-vocab-llama-spm.gguf.gz")
    path = tmp_path / "vocab.gguf"
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    metadata = read_gguf(path).metadata
    tokenizer = tokenizer_from_gguf(metadata)
    tokens, kinds, values = (
        cast(list[Any], metadata[f"tokenizer.ggml.{n}"]) for n in ("tokens", "token_type", "scores")
    )
    scores = {str(t): float(v) for t, k, v in zip(tokens, kinds, values, strict=True) if k == NORMAL}
    texts = [text for text, _ in vectors("llama-spm")]
    for text in (*texts, *(" " * n for n in range(1, 60)), *("=" * n + " x" for n in range(1, 60)), "ab" * 40):
        parts = by_score("▁" + text.replace(" ", "▁"), scores) if text else []
        expected = [
            tokens.index(piece)
            for part in parts
            for piece in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])
        ]
        assert tokenizer.encode(text, add_special=False) == expected, text


def test_tokenizer_from_gguf_is_the_same_by_either_door() -> None:
    metadata = byte_level_metadata()
    tokenizer = Tokenizer.from_gguf(metadata, "m.gguf", template="<|im_end|>")
    assert tokenizer.encode("hello") == tokenizer_from_gguf(metadata).encode("hello")
    assert tokenizer.eos_ids == {BOS_ID + 1, BOS_ID + 3}
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_gguf({}, "m.gguf")
    assert caught.value.path == "m.gguf"
