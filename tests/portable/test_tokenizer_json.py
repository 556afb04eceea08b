"""tokenizer.json and the files beside it: small ones of every shape, and published vocabularies with vectors."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.portable.vocabularies import (
    BOS,
    BOS_ID,
    EOS,
    IM_END,
    THINK,
    byte_level,
    byte_level_json,
    byte_level_metadata,
)
from tests.shared_data import shared
from troth.errors import ModelLoadError, RequestError
from troth.text.gguf_tokenizer import tokenizer_from_gguf
from troth.text.tokenizer import Tokenizer
from troth.text.tokenizer_json import tokenizer_from_json

PUBLISHED = ("qwen3", "llama3_1", "gptoss", "gemma3", "deepseek_v3")
PRE_OF = {"qwen3": "qwen2", "llama3_1": "llama-bpe", "gptoss": "gpt-4o", "deepseek_v3": "deepseek-v3"}
PIECES = [
    *("a", "B", "ſ", "ǅ", "É", "\u0301", "1", "٣", "½", "'", "'s", "'LL", "'ve", ".", "!!", "///", "(", "_", "$", "+"),
    *("漢", "か", "한", "😀", "\r", "\n", "\t", "«", "、", " ", "  ", "\u00a0"),
]


def sentencepiece_json(decoder: Any, **parts: Any) -> bytes:
    vocab = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "<0x0A>": 5, "<0xC3>": 6, "<0xA9>": 7}
    model = {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"]], "unk_token": "<unk>", "byte_fallback": True}
    return byte_level_json(model=model, added_tokens=[], pre_tokenizer=None, decoder=decoder, **parts)


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (sequence(REPLACE, FALLBACK, FUSE, STRIP), "a b\né"),
        (sequence(REPLACE, FALLBACK, FUSE), " a b\né"),
        (sequence(METASPACE, FALLBACK), "a b\né"),
        (sequence(METASPACE | {"prepend_scheme": "never"}, sequence(FALLBACK)), " a b\né"),
    ],
    ids=["llama", "gemma", "metaspace", "metaspace_never"],
)
def test_tokenizer_json_decodes_sentencepiece_by_its_decoder(decoder: dict[str, Any], expected: str) -> None:
    tokenizer = tokenizer_from_json(sentencepiece_json(decoder))
    assert tokenizer.decode([4, 1, 3, 5, 6, 7]) == expected


def test_tokenizer_json_decodes_wordpiece_without_tidying() -> None:
    model = {
        "type": "WordPiece",
        "vocab": {"[UNK]": 0, "hello": 1, "##s": 2, ",": 3},
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    data = byte_level_json(model=model, added_tokens=[], pre_tokenizer={"type": "BertPreTokenizer"}, decoder=decoder)
    tokenizer = tokenizer_from_json(data)
    assert tokenizer.encode("hellos , hello") == [1, 2, 3, 1]
    assert tokenizer.decode([1, 2, 3, 1]) == "hellos , hello"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "none"),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"),
        ({"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": True}, "CTC"),
        (sequence(REPLACE | {"content": "_"}, FALLBACK), "Replace"),
        (sequence(REPLACE | {"pattern": {"Regex": "▁"}}, FALLBACK), "Replace"),
        (sequence(FALLBACK, STRIP | {"stop": 1}), "Strip"),
        (sequence(METASPACE | {"replacement": "_"}), "Metaspace"),
        ({"type": "WordPiece", "prefix": "@@", "cleanup": False}, "WordPiece"),
        (
            sequence({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, REPLACE),
            "+",
        ),
        (sequence(FUSE), "none"),
    ],
)
def test_tokenizer_json_refuses_an_unknown_decoder_by_name(decoder: dict[str, Any] | None, named: str) -> None:
    with pytest.raises(ModelLoadError, match="decoder") as caught:
        tokenizer_from_json(byte_level_json(decoder=decoder), path="model/tokenizer.json")
    assert named in str(caught.value)
    assert caught.value.path == "model/tokenizer.json"


def test_tokenizer_json_refuses_a_damaged_file() -> None:
    for data in (b"", b"{}", byte_level_json()[:-20], b"\xff\xfe"):
        with pytest.raises(ModelLoadError, match="tokenizer"):
            tokenizer_from_json(data)


@pytest.mark.parametrize("vocab", [{"a": 0, "b": 2**32 - 1}, {"a": 2**24}, {}])
def test_tokenizer_json_refuses_ids_it_would_count_to_for_minutes(vocab: dict[str, int]) -> None:
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    with pytest.raises(ModelLoadError, match="ids") as caught:
        tokenizer_from_json(byte_level_json(model=model, added_tokens=[]), path="tokenizer.json")
    assert "tokenizer.json: model" in str(caught.value)


def test_tokenizer_json_whose_pattern_backtracks_without_end_refuses_the_text() -> None:
    """The library panics: its exception went past every ``except Exception``."""
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer = tokenizer_from_json(byte_level_json(pre_tokenizer=split))
    assert tokenizer.decode(tokenizer.encode("ay")) == "ay"
    for encode in (
        lambda: tokenizer.encode("x" * 100, param="text"),
        lambda: tokenizer.encode("x" * 100, parse_special=False, param="text"),
        lambda: tokenizer.encode_split("x" * 100, 1, param="text"),
    ):
        with pytest.raises(RequestError, match="cannot read text") as caught:
            encode()
        assert caught.value.param == "text"


def test_tokenizer_json_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    tokenizer = byte_level(added=[{"content": "<｜x▁y｜>", "special": False}, {"content": "ø ", "special": False}])
    ids = tokenizer.encode("<｜x▁y｜>ø ")
    assert len(ids) == 2
    assert tokenizer.decode(ids) == "<｜x▁y｜>ø "


def write(folder: Path, **files: Any) -> Path:
    (folder / "tokenizer.json").write_bytes(byte_level_json())
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{name}.json").write_text(text)
    return folder


def test_tokenizer_folder_gathers_eos_ids_from_every_file(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        tokenizer_config={"eos_token": EOS},
        special_tokens_map={"bos_token": BOS, "eos_token": "ignored: the config wins"},
        generation_config={"eos_token_id": [BOS_ID + 3, True, "x"]},
        config={"eos_token_id": 5, "text_config": {"eos_token_id": 6}},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_ids == {BOS_ID + 1, BOS_ID + 3, 5, 6}
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BOS, EOS)


def test_tokenizer_folder_drops_eos_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = write(tmp_path, generation_config={"eos_token_id": [10**6, -1, 5]})
    assert Tokenizer.from_folder(folder).eos_ids == {5}


@pytest.mark.parametrize(
    ("template", "ends"), [(f"{{{{ '{IM_END}' }}}}", True), ("{{ messages }}", False), (THINK, False), (None, False)]
)
def test_tokenizer_end_of_turn_token_ends_an_answer_when_the_template_writes_it(
    template: str | None, ends: bool
) -> None:
    assert (BOS_ID + 3 in byte_level(template=template).eos_ids) is ends


def test_tokenizer_end_of_turn_text_that_is_no_control_token_does_not_count() -> None:
    tokenizer = byte_level(template="<end_of_turn>", added=[{"content": "<end_of_turn>", "special": False}])
    assert tokenizer.eos_ids == {BOS_ID + 1}


def test_tokenizer_harmony_end_only_ends_a_message() -> None:
    added = [{"content": token, "special": True} for token in ("<|end|>", "<|return|>", "<|call|>")]
    template = "<|end|> <|return|> <|call|>"
    first = BOS_ID + 5
    assert byte_level(added=added, template=template).eos_ids == {BOS_ID + 1, first + 1, first + 2}
    assert byte_level(added=added[:1], template=template).eos_ids == {BOS_ID + 1, first}


def test_tokenizer_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_folder(tmp_path)
    assert caught.value.path == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", ["[1]", "{", "[" * 100_000])
def test_tokenizer_folder_refuses_a_damaged_config(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, tokenizer_config=content)
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_folder(folder)
    assert caught.value.path.endswith("tokenizer_config.json")


@dataclass(frozen=True)
class Published:
    """A published vocabulary and what the reference library makes of some texts with it."""

    name: str
    tokenizer: Tokenizer
    vectors: list[dict[str, Any]]


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request: pytest.FixtureRequest) -> Published:
    folder = shared(f"tokenizers/{request.param}")
    names = next(path for path in folder.iterdir() if path.name.startswith("tokenizer_config"))
    config = json.loads(gzip.decompress(names.read_bytes()) if names.suffix == ".gz" else names.read_bytes())
    data = gzip.decompress((folder / "tokenizer.json.gz").read_bytes())
    lines = (folder / "vectors.jsonl").read_text(encoding="utf-8").splitlines()
    return Published(request.param, tokenizer_from_json(data, names=config), [json.loads(line) for line in lines])


def test_tokenizer_json_published_vectors_come_out_equal(published: Published) -> None:
    tokenizer = published.tokenizer
    assert len(published.vectors) > 30
    for row in published.vectors:
        ids, with_special = row["ids"], row["ids_with_special"] or row["ids"]
        assert tokenizer.encode(row["text"], add_special=False) == ids, row["text"]
        assert tokenizer.encode(row["text"]) == with_special, row["text"]
        assert tokenizer.decode(ids, skip_special=False) == row["decoded"], row["text"]
        assert tokenizer.decode(with_special) == row["decoded_skip_special"], row["text"]
        assert tokenizer.min_num_tokens(row["text"]) <= len(ids), row["text"]


def test_tokenizer_json_published_control_tokens_are_spelled_when_not_parsed(published: Published) -> None:
    tokenizer = published.tokenizer
    control = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)][:300]
    assert control
    for token_id in control:
        text = tokenizer.decode([token_id], skip_special=False)
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert not any(map(tokenizer.is_special, ids)), text
        assert tokenizer.decode(ids) == text


def test_tokenizer_json_published_bound_on_tokens_is_known(published: Published) -> None:
    assert published.tokenizer.min_num_tokens("x" * 10**6) > 10**6 // 500


@given(st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokenizer_gguf_words_are_those_of_the_published_tokenizer_json(published: Published, text: str) -> None:
    """The pattern that GGUF files only name is the one the model's authors published."""
    if published.name not in PRE_OF:
        assert published.name == "gemma3", "the only one that does not split words"
        return
    named = tokenizer_from_gguf_cached(PRE_OF[published.name])
    ours, theirs = (t._encoder.pre_tokenizer.pre_tokenize_str(text) for t in (named, published.tokenizer))
    assert ours == theirs


@cache
def tokenizer_from_gguf_cached(pre: str) -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata(pre=pre))
