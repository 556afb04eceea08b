"""Token ids of kept beginnings: always those of the whole text, and found again from turn to turn."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.portable.test_prompt_cache_turns import published as published_json
from tests.portable.vocabularies import BOS, IM_END, IM_START, THINK, byte_level, sentencepiece
from tests.shared_data import shared
from troth.artifact.gguf import read_gguf
from troth.errors import RequestError
from troth.text.chat_template import ChatTemplate
from troth.text.control_text import MARK
from troth.text.gguf_tokenizer import tokenizer_from_gguf
from troth.text.object_cache import BoundedObjects
from troth.text.prompt import PromptBuilder
from troth.text.token_beginnings import MIN_CHARACTERS, TokenBeginnings
from troth.text.tokenizer import Tokenizer

PUBLISHED = ("json-qwen3", "gguf-llama-spm", "gguf-phi-3")
"""Of byte-level words, of SentencePiece's pieces and with tokens that take spaces along."""
NUM_EXAMPLES = 15
PIECES = (
    *(
        "a",
        "hello",
        " ",
        "   ",
        "\n",
        "\n\n",
        "\r",
        "\t",
        "é",
        "e\u0301",
        "1234567",
        "▁",
        "'s",
        " the",
        "ing",
        "日本",
        "\0",
    ),
    *(f"<{MARK}s>", f"<{MARK}|im_end|>", "<", "|>", "<|im_", "😀"),
)


@cache
def published(name: str, folder: Path) -> Tokenizer:
    kind, _, model = name.partition("-")
    if kind == "json":
        return published_json(model)
    path = folder / f"{model}.gguf"
    path.write_bytes(gzip.decompress(shared(f"gguf_vocab/ggml-vocab-{model}.gguf.gz").read_bytes()))
    return tokenizer_from_gguf(read_gguf(path).metadata, str(path))


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", *PUBLISHED])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "byte_level":
        return byte_level()
    if request.param == "sentencepiece":
        return sentencepiece()
    return published(request.param, tmp_path_factory.mktemp("vocabularies"))


def test_ids_of_kept_beginnings_are_those_of_the_whole_text(tokenizer: Tokenizer) -> None:
    """Texts that part anywhere: inside a control token, behind one, in the middle of a word and of its merges."""
    controls = sorted(tokenizer.cut_texts.values())[-6:]
    assert controls
    piece = st.sampled_from((*PIECES, *controls, *controls, *controls, THINK, BOS))
    num_hits = 0

    @given(st.data())
    @settings(max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def parts_anywhere(data: st.DataObject) -> None:
        nonlocal num_hits
        objects = BoundedObjects(1 << 20)
        beginnings = TokenBeginnings(tokenizer, objects)
        text = " x" * (MIN_CHARACTERS // 2) + "".join(data.draw(st.lists(piece, min_size=8, max_size=30)))
        for _ in range(4):
            expected, (boundary,) = tokenizer.encode_guarded(text, [cut := data.draw(st.integers(0, len(text)))])
            ids, found = beginnings.encode(text, cut)
            assert ids == expected
            assert found in (boundary, None)
            text = text[: len(text) - data.draw(st.integers(0, 60))] + "".join(data.draw(st.lists(piece, max_size=12)))
        num_hits += objects.status().num_hits

    parts_anywhere()
    assert num_hits > 5, "or nothing was proved"


def test_beginnings_are_found_again_and_only_what_follows_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        bos_token=None,
        eos_token=None,
    )
    builder = PromptBuilder(tokenizer, template, context_tokens=100_000)
    messages = [{"role": "system", "content": "Be brief. " * 200}]
    encoded: list[int] = []
    real = Tokenizer.encode_guarded

    def counted(self: Tokenizer, text: str, cuts: list[int], **rest: str) -> tuple[list[int], list[int | None]]:
        encoded.append(len(text))
        return real(self, text, cuts, **rest)

    monkeypatch.setattr(Tokenizer, "encode_guarded", counted)
    for turn in range(5):
        messages.append({"role": "user", "content": f"Question {turn}? " * 20})
        encoded.clear()
        prompt = builder.chat(messages)
        assert list(prompt.ids) == tokenizer.encode(prompt.text, add_special=False)
        assert prompt.boundary == len(prompt.ids) - len(tokenizer.encode(f"{IM_START}assistant\n", add_special=False))
        # The turn before, of which the answer was not part, this one, and the end of the opening.
        assert turn == 0 or sum(encoded) < 900, encoded
        messages.append({"role": "assistant", "content": f"Answer {turn}."})
    forked = [*messages[:-2], {"role": "user", "content": "Something else"}]
    encoded.clear()
    prompt = builder.chat(forked)
    assert list(prompt.ids) == tokenizer.encode(prompt.text, add_special=False)
    assert sum(encoded) < 900, "a branch goes on from where it parts"


def test_beginnings_need_no_control_tokens() -> None:
    tokenizer = byte_level()
    beginnings = TokenBeginnings(tokenizer, BoundedObjects(1 << 20))
    for text in ("plain text " * 100, "plain text " * 101):
        assert beginnings.encode(text, 0)[0] == tokenizer.encode(text, add_special=False)


def test_beginnings_do_not_reach_into_a_control_token_that_goes_on_otherwise() -> None:
    """``<|x|>`` is where the longer ``<|x|>y`` could begin: up to there texts must agree on what follows, too."""
    tokenizer = byte_level(
        added=[
            {
                "id": 900,
                "content": "<|x|>",
                "special": True,
                "normalized": False,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
            }
        ]
    )
    beginnings = TokenBeginnings(tokenizer, BoundedObjects(1 << 20))
    head = "word " * 100
    for tail in ("<|x|>", "<|x|>", f"<|x|>{IM_END}", "<|x|", "<|x|>a"):
        assert beginnings.encode(head + tail, 0)[0] == tokenizer.encode_guarded(head + tail, [])[0]


def test_beginnings_refuse_half_a_surrogate_pair_wherever_it_stands() -> None:
    tokenizer = byte_level()
    beginnings = TokenBeginnings(tokenizer, BoundedObjects(1 << 20))
    head = "word " * 100 + IM_START
    beginnings.encode(head + "a" * 100, 0)
    for text in (head + "a" * 100 + "\ud800", "\ud800" + head):
        with pytest.raises(RequestError, match="surrogate"):
            beginnings.encode(text, 0)
