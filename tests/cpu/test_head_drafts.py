"""Multi-token prediction: what the head drafts, however its keys and values came about, and that no answer changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import laws
from tests.cpu.draft_heads import (
    GRAMMAR,
    VOCAB,
    Drafted,
    HeadEngines,
    Reference,
    load_with_head,
    save_with_head,
    save_with_head_of_experts,
)
from tests.shared_data import shared
from troth.contracts.grammar import Grammar
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import DraftSourceName, Speculation
from troth.run.head_drafts import HeadDrafts
from troth.run.head_passes import HeadPasses
from troth.text.tokenizer import Tokenizer

NEAR = 1e-3
"""Logits closer than this may be drafted either way: the engine sums in another order."""


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(name="engines")
def _engines(folder: Path) -> HeadEngines:
    return HeadEngines(load_with_head(folder))


@pytest.fixture(scope="module", name="reference")
def _reference(folder: Path) -> Reference:
    return Reference(folder)


def requests(*lengths: int, depth: int = 3, max_tokens: int = 24, temperature: float = 0.0) -> list[Request]:
    """Random prompts of these lengths, whose answers are drafted for."""
    return [
        Request(
            request_id=RequestId(f"r{number}"),
            prompt_ids=tuple(
                torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
            ),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=number, logprobs=0),
            speculation=Speculation(sources=("mtp",), depth=depth, adaptive=False),
        )
        for number, length in enumerate(lengths)
    ]


def check_drafts(
    reference: Reference, drafted: Sequence[Drafted], asked: Sequence[Request], answers: Sequence[laws.Answer]
) -> None:
    """Every draft is the reference's, or as likely as the reference's up to rounding."""
    known = {one.request_id: [*one.prompt_ids, *answer.token_ids] for one, answer in zip(asked, answers, strict=True)}
    hidden = {request_id: reference.hidden(token_ids) for request_id, token_ids in known.items()}
    assert drafted
    for one in drafted:
        tokens = known[one.request_id][: one.position + 1]
        assert len(tokens) == one.position + 1
        wanted = reference.drafts(tokens, hidden[one.request_id][: one.position], len(one.token_ids))
        for token_id, logits_V in zip(one.token_ids, wanted, strict=True):
            assert logits_V.max() - logits_V[token_id] < NEAR, one
            if token_id != int(logits_V.argmax()):
                break  # what follows was drafted behind another token


def off(asked: Sequence[Request]) -> list[Request]:
    return [replace(one, speculation=None) for one in asked]


@pytest.mark.parametrize("chunk", [5, 16, 33, 256])
def test_head_drafts_the_reference_drafts_however_the_prompt_was_cut(
    engines: HeadEngines, reference: Reference, chunk: int
) -> None:
    asked = requests(1, 2, 16, 47, 90, depth=4)
    serving = laws.Serving(chunk_tokens=chunk, step_tokens=chunk, max_rows=3)
    answers, _ = laws.serve(engines, serving, asked)
    laws.assert_same(answers, laws.alone(engines, off(asked)))
    check_drafts(reference, engines.drafted, asked, answers)


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_head_drafts_the_reference_drafts_at_every_depth(
    engines: HeadEngines, reference: Reference, depth: int
) -> None:
    asked = requests(20, 31, depth=depth, max_tokens=20)
    answers, _ = laws.serve(engines, laws.Serving(), asked)
    assert max(len(one.token_ids) for one in engines.drafted) == depth
    check_drafts(reference, engines.drafted, asked, answers)


@pytest.mark.parametrize("stacked", [False, True])
def test_head_of_experts_drafts_the_reference_drafts(tmp_path: Path, stacked: bool) -> None:
    folder = save_with_head_of_experts(tmp_path, stacked=stacked)
    engines, asked = HeadEngines(load_with_head(folder)), requests(20, 31, max_tokens=16)
    answers, _ = laws.serve(engines, laws.Serving(chunk_tokens=16), asked)
    laws.assert_same(answers, laws.alone(engines, off(asked)))
    check_drafts(Reference(folder), engines.drafted, asked, answers)


def test_head_resumes_exactly_behind_cached_blocks_whoever_computed_them(
    engines: HeadEngines, reference: Reference
) -> None:
    """Off rows leave what drafting rows go on from, and the other way round; a row may switch at any turn."""
    loop, scheduler = engines(laws.Serving(prompt_cache=True))
    first = requests(70, 35, max_tokens=30)
    first = [replace(one, boundary=len(one.prompt_ids) - 3) for one in first]
    asked = [replace(first[0], speculation=None), first[1]]
    answers = laws.serve_on(loop, scheduler, asked)
    second = []
    for one, answer in zip(first, answers, strict=True):
        prompt = (*one.prompt_ids, *answer.token_ids, 3, 1, 4)
        second.append(replace(one, request_id=RequestId(f"{one.request_id}-2"), prompt_ids=prompt, boundary=None))
    engines.drafted.clear()
    warm = laws.serve_on(loop, scheduler, second)
    cold, _ = laws.serve(engines, laws.Serving(), off(second))
    laws.assert_same(warm, cold)
    assert all(answer.end.usage.num_cached_tokens >= 2 * BLOCK_TOKENS for answer in warm)
    check_drafts(reference, engines.drafted, second, warm)


def test_head_resumes_exactly_behind_blocks_from_disk(
    engines: HeadEngines, reference: Reference, tmp_path: Path
) -> None:
    asked = [replace(one, boundary=60) for one in requests(70)]
    serving = laws.Serving(prompt_cache=True, disk_folder=tmp_path)
    loop, scheduler = engines(serving)
    laws.serve_on(loop, scheduler, asked)
    loop.close()
    loop, scheduler = engines(serving)
    engines.drafted.clear()
    answers = laws.serve_on(loop, scheduler, asked)
    assert answers[0].end.usage.num_cached_tokens == 48
    check_drafts(reference, engines.drafted, asked, answers)
    loop.close()


def test_head_drafts_the_reference_drafts_for_rows_that_lost_their_blocks(
    engines: HeadEngines, reference: Reference
) -> None:
    asked = requests(12, 11, 10, 9, max_tokens=40)
    answers, scheduler = laws.serve(engines, laws.Serving(num_blocks=7, prompt_cache=True), asked)
    assert scheduler.num_preemptions > 0
    laws.assert_same(answers, laws.alone(engines, off(asked)))
    check_drafts(reference, engines.drafted, asked, answers)


def test_head_drafts_the_reference_drafts_beside_those_of_others(engines: HeadEngines, reference: Reference) -> None:
    """Rows without drafts, of a look-up and of both in one step; the look-up's drafts are longer than the head's."""
    asked = requests(40, 33, 18, 25, max_tokens=40, depth=8)
    asked[1] = replace(asked[1], speculation=None)
    both = Speculation(sources=("ngram", "mtp"), depth=8, adaptive=False)
    asked[2] = replace(asked[2], speculation=both, prompt_ids=(1, 2, 3, 4, 5) * 4)
    answers, _ = laws.serve(engines, laws.Serving(max_rows=4), asked, stagger=1)
    laws.assert_same(answers, laws.alone(engines, off(asked)))
    made = [one for one in engines.drafted if one.request_id != "r2"]
    check_drafts(reference, made, [asked[0], asked[3]], [answers[0], answers[3]])
    stats = answers[2].end.speculation
    assert stats is not None
    assert set(stats.num_drafted_by_source) == {"ngram", "mtp"}


@pytest.fixture(scope="module", name="folders")
def _folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    experts = save_with_head_of_experts(tmp_path_factory.mktemp("experts"), stacked=True)
    return {"qwen3_5": folder, "qwen3_5_moe": experts}


@given(
    family=st.sampled_from(["qwen3_5", "qwen3_5_moe"]),
    rows=st.lists(
        st.tuples(
            st.integers(1, 60),
            st.sampled_from([0.0, 0.7, 1.3]),
            st.sampled_from([0.0, 0.8]),
            st.integers(0, 8),
            st.sampled_from([None, None, GRAMMAR]),
        ),
        min_size=1,
        max_size=4,
    ),
    num_blocks=st.sampled_from([8, 12, 200]),
    stagger=st.integers(0, 2),
)
@settings(max_examples=6, deadline=None)
def test_law_speculation_with_a_head_changes_nothing(
    folders: dict[str, Path],
    family: str,
    rows: list[tuple[int, float, float, int, Grammar | None]],
    num_blocks: int,
    stagger: int,
) -> None:
    """Greedy and sampled, penalised, constrained, drafted for at any depth or not at all, with little room, twice."""
    engines = HeadEngines(load_with_head(folders[family]))
    asked = []
    for number, (length, temperature, penalty, depth, grammar) in enumerate(rows):
        (one,) = requests(length, temperature=temperature, depth=max(1, depth), max_tokens=20)
        sampling = replace(one.sampling, frequency_penalty=penalty, seed=number)
        sources: tuple[DraftSourceName, ...] = ("grammar", "mtp") if grammar is not None and depth % 2 else ("mtp",)
        drafts = Speculation(sources=sources if depth else (), depth=depth or None, adaptive=False)
        request_id = RequestId(f"r{number}")
        asked.append(replace(one, request_id=request_id, sampling=sampling, speculation=drafts, grammar=grammar))
    wanted = laws.alone(engines, off(asked))
    loop, scheduler = engines(laws.Serving(max_rows=4, num_blocks=num_blocks, prompt_cache=True, chunk_tokens=48))
    for _ in range(2):
        laws.assert_same(laws.serve_on(loop, scheduler, asked, stagger=stagger), wanted)
    stats = loop.status("ready", ()).speculation
    assert stats is not None
    assert (stats.num_drafted > 0) == any(depth for _, _, _, depth, _ in rows)


def test_keyed_guesses_are_right_more_often_than_likeliest_ones(engines: HeadEngines) -> None:
    """A draft is drawn with the noise of the draw that verifies it: heads that know the distribution hit it at any
    temperature. Here the head knows nothing, and still the noise alone makes it agree more often than one in VOCAB.
    """
    asked = requests(30, 31, 32, 33, temperature=3.0, depth=1, max_tokens=100)
    loop, scheduler = engines(laws.Serving())
    laws.serve_on(loop, scheduler, asked)
    stats = loop.status("ready", ()).speculation
    assert stats is not None
    assert stats.num_accepted / stats.num_drafted > 2 / VOCAB


@pytest.mark.parametrize(("owner", "work"), [(HeadPasses, "run"), (HeadDrafts, "note"), (HeadDrafts, "follow")])
def test_a_head_that_fails_is_dropped_and_the_answer_goes_on(
    engines: HeadEngines, monkeypatch: pytest.MonkeyPatch, owner: type, work: str
) -> None:
    """While it drafts, takes in what was computed (and hands frontiers to shared blocks), or makes way for a row."""
    asked = requests(20, 21)
    wanted = laws.alone(engines, off(asked))
    loop, scheduler = engines(laws.Serving())
    does, calls = getattr(owner, work), 0

    def fails_later(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise RuntimeError("no more")
        return does(self, *arguments)

    monkeypatch.setattr(owner, work, fails_later)
    answers = laws.serve_on(loop, scheduler, asked)
    laws.assert_same(answers, wanted)
    for answer in answers:
        assert answer.end.speculation is not None
        assert answer.end.speculation.num_drafted > 0
        assert answer.end.speculation.disabled_reason == "the draft head failed: no more"
    assert calls == 6


@pytest.mark.e2e
@pytest.mark.parametrize("depth", [1, 3])
def test_troth_tiny_hybrid_drafts_its_golden_drafts(depth: int) -> None:
    """Chats it was trained on, free prompts and raw text: ids and acceptance up to the end, in batches of four."""
    folder = shared("troth-tiny-hybrid")
    golden = json.loads((folder / "mtp_golden.json").read_text())["prompts"]
    model = load_with_head(folder, context_tokens=2048)
    engines = HeadEngines(model, context_tokens=2048, tokenizer=Tokenizer.from_folder(folder, template=None))
    asked = [
        replace(one, prompt_ids=tuple(prompt["prompt_ids"]))
        for one, prompt in zip(requests(*[1] * len(golden), depth=depth, max_tokens=64), golden, strict=True)
    ]
    answers, _ = laws.serve(engines, laws.Serving(max_rows=4, num_blocks=400), asked)
    for one, answer, prompt in zip(asked, answers, golden, strict=True):
        end = 64 if prompt["stop_at"] is None else prompt["stop_at"]
        greedy_ids = prompt["greedy_ids"]
        assert answer.token_ids[:end] == greedy_ids[:end]
        place = 0
        for drafted in (each for each in engines.drafted if each.request_id == one.request_id):
            place = drafted.position - len(one.prompt_ids)
            wanted = [token_id for i, token_id in enumerate(prompt["drafts"][place]) if place + i + 1 <= end]
            if place >= end:
                break
            assert drafted.token_ids[: len(wanted)] == wanted[: len(drafted.token_ids)], (prompt["id"], place)
        steps = [each.position - len(one.prompt_ids) for each in engines.drafted if each.request_id == one.request_id]
        assert [step for step in steps if step < end] == _steps(prompt, depth, end)


def _steps(prompt: dict[str, Any], depth: int, end: int) -> list[int]:
    """Behind which answer tokens a step with drafts goes on, by the golden drafts."""
    steps, place = list[int](), 0
    while place < end and place < 62:
        steps.append(place)
        drafts, right = prompt["drafts"][place][: min(depth, 62 - place)], 0
        while right < len(drafts) and drafts[right] == prompt["greedy_ids"][place + right + 1]:
            right += 1
        place += right + 1
    return steps
