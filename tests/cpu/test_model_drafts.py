"""A second model drafts: no answer changes, whatever it says, and where it is the model itself every draft is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import laws
from tests.cpu.disk_blocks import disk_cache
from tests.cpu.draft_heads import GRAMMAR, VOCAB
from tests.cpu.tiny_models import CONTEXT, CPU, DENSE, SMALL_HYBRID, random_model, save
from tests.cpu.tiny_models import EXPERTS as OF_EXPERTS
from troth.artifact.resolve import resolve
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import SPARE_BLOCKS, CacheStorage
from troth.config.facts import MachineFacts
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.cache_spec import attention_groups, recurrent_bytes, with_guests
from troth.contracts.grammar import Grammar
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import Speculation
from troth.draft.made import MadeTerms
from troth.errors import CapabilityUnavailable
from troth.models.family import Model, Placement
from troth.models.registry import recognise
from troth.ops.impl import cpu
from troth.ops.linear import linear
from troth.run.batch import BatchBuilder
from troth.run.draft_model import require_drafts
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.model_drafts import ModelDrafts
from troth.run.planned import namespace_of, plan_model
from troth.run.recorded import RecordedDecode
from troth.run.runner import ModelRunner
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.grammar import GrammarCompiler

LLAMA = {**DENSE, "vocab_size": VOCAB}
TARGET: Any = transformers.LlamaConfig(**LLAMA)
DRAFT: Any = transformers.LlamaConfig(
    **{
        **LLAMA,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "vocab_size": VOCAB + 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
)
TWO_LAYERS = {
    **LLAMA,
    **SMALL_HYBRID,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
HYBRID: Any = transformers.Qwen3_5TextConfig(**TWO_LAYERS)
EXPERTS: Any = transformers.AutoConfig.for_model(
    "qwen3_5_moe_text",
    **{key: value for key, value in TWO_LAYERS.items() if key != "intermediate_size"},
    **OF_EXPERTS,
)
NEXT: Any = transformers.Qwen3NextConfig(**TWO_LAYERS, **OF_EXPERTS)
CONVS: Any = transformers.Lfm2Config(
    **{**LLAMA, "num_hidden_layers": 2}, layer_types=["conv", "full_attention"], block_multiple_of=32
)
WINDOWED: Any = transformers.Gemma3TextConfig(
    **{**LLAMA, "num_hidden_layers": 2},
    head_dim=16,
    sliding_window=20,
    layer_types=["sliding_attention", "full_attention"],
)

SLIDING: Any = transformers.Gemma3TextConfig(
    **{**LLAMA, "num_hidden_layers": 1}, head_dim=16, sliding_window=20, layer_types=["sliding_attention"]
)
CONFIGS = {
    "target": TARGET,
    "draft": DRAFT,
    "hybrid": HYBRID,
    "experts": EXPERTS,
    "next": NEXT,
    "convs": CONVS,
    "windowed": WINDOWED,
    "sliding": SLIDING,
}
FACTS = MachineFacts(num_cores=1, total_bytes=8 * 2**30, available_bytes=4 * 2**30, gpus=())


class Engines:
    """Builds engines over one model and another that drafts for it. What was never written to the caches is NaN."""

    def __init__(self, model: Model, draft_model: Model) -> None:
        self._model, self._draft_model = model, draft_model

    def __call__(self, serving: laws.Serving) -> tuple[EngineLoop, Scheduler]:
        """As laws.BuildEngine."""
        guests = attention_groups(self._draft_model.config.cache_specs(4))
        specs = with_guests(self._model.config.cache_specs(4), guests)
        limits = serving.limits(specs, CONTEXT)
        cache = CacheStorage(specs, limits.num_blocks, serving.max_rows, dtype=torch.float32, device=CPU)
        for kv in cache.kv.values():
            kv.k_NKDS.fill_(torch.nan)
            kv.v_NKSD.fill_(torch.nan)
        scheduler, ticks = Scheduler(limits), count()
        batches = BatchBuilder(attention_groups(specs), serving.max_rows, CONTEXT)
        recorded = RecordedDecode(self._model, cache, batches, cpu.recording) if "cpu" in linear.active else None
        hybrid = recurrent_bytes(specs) is not None
        checkpoints = CheckpointStorage(cache, serving.num_checkpoints) if hybrid else None
        grammars = RowGrammars(GrammarCompiler(ByteTokenizer(), VOCAB))
        runner = ModelRunner(
            self._model, cache, batches, recorded, checkpoints, grammars, draft_model=self._draft_model
        )
        terms = MadeTerms(refusal=None, failure=lambda: runner.made_drafts_failure)
        drafting = Drafting(
            scheduler, lambda: float(next(ticks)), forced_ids=grammars.forced_ids, made={"draft": terms}
        )
        disk = disk_cache(serving.disk_folder, scheduler, cache, checkpoints) if serving.disk_folder else None
        loop = EngineLoop(
            scheduler,
            runner,
            ByteTokenizer(),
            clock=lambda: float(next(ticks)),
            grammars=grammars,
            disk=disk,
            drafting=drafting,
        )
        return loop, scheduler


@pytest.fixture(scope="module", name="folders")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, config in CONFIGS.items():
        save(random_model(config, 0), made[name])
    return made


@pytest.fixture(scope="module", name="models")
def _models(folders: dict[str, Path]) -> dict[str, Model]:
    place = Placement(device=CPU, dtype=torch.float32, context_tokens=CONTEXT)
    return {name: recognise(resolve(folder)).load(place) for name, folder in folders.items()}


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
            speculation=Speculation(sources=("draft",), depth=depth, adaptive=False),
        )
        for number, length in enumerate(lengths)
    ]


def off(asked: Sequence[Request]) -> list[Request]:
    return [replace(one, speculation=None) for one in asked]


def assert_all_right(answers: Sequence[laws.Answer]) -> None:
    """Every answer was drafted for, and no draft was wrong but those behind its end."""
    for answer in answers:
        stats = answer.end.speculation
        assert stats is not None
        assert stats.disabled_reason is None
        assert stats.num_drafted == stats.num_accepted > 0
        assert stats.num_accepted_by_source == {"draft": stats.num_accepted}


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_draft_is_right_where_the_model_drafts_for_itself(
    models: dict[str, Model], depth: int, temperature: float
) -> None:
    """Whatever its keys and values came from: chunks, single tokens, drafts that were right."""
    engines = Engines(models["target"], models["target"])
    asked = requests(1, 16, 47, 90, depth=depth, temperature=temperature)
    for serving in (laws.Serving(), laws.Serving(chunk_tokens=9, step_tokens=20, max_rows=3)):
        answers, _ = laws.serve(engines, serving, asked, stagger=1)
        laws.assert_same(answers, laws.alone(engines, off(asked)))
        assert_all_right(answers)


def test_every_draft_is_right_behind_cached_blocks_whoever_computed_them(models: dict[str, Model]) -> None:
    """Rows that are not drafted for leave what drafting rows go on from, after their blocks were filled token by token;
    and rows whose blocks were taken come back to them."""
    engines = Engines(models["target"], models["target"])
    first = off(requests(70, 35, max_tokens=30))
    loop, scheduler = engines(laws.Serving(prompt_cache=True))
    answers = laws.serve_on(loop, scheduler, first)
    second = [
        replace(one, request_id=RequestId(f"s{i}"), prompt_ids=(*one.prompt_ids, *answer.token_ids, 3, 1, 4))
        for i, (one, answer) in enumerate(zip(requests(70, 35), answers, strict=True))
    ]
    warm = laws.serve_on(loop, scheduler, second)
    laws.assert_same(warm, laws.alone(engines, off(second)))
    assert all(answer.end.usage.num_cached_tokens >= 4 * BLOCK_TOKENS for answer in warm)
    assert_all_right(warm)
    asked = requests(12, 11, 10, 9, max_tokens=40)
    answers, scheduler = laws.serve(engines, laws.Serving(num_blocks=7, prompt_cache=True), asked)
    assert scheduler.num_preemptions > 0
    assert_all_right(answers)


def test_every_draft_is_right_behind_blocks_from_disk(models: dict[str, Model], tmp_path: Path) -> None:
    engines = Engines(models["target"], models["target"])
    serving = laws.Serving(prompt_cache=True, disk_folder=tmp_path)
    for num_cached in (0, 4 * BLOCK_TOKENS):
        loop, scheduler = engines(serving)
        (answer,) = laws.serve_on(loop, scheduler, requests(70))
        assert answer.end.usage.num_cached_tokens == num_cached
        assert_all_right([answer])
        loop.close()


@given(
    target=st.sampled_from(["target", "hybrid", "experts", "next", "convs", "windowed"]),
    draft=st.sampled_from(["draft", "windowed", "sliding"]),
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
def test_law_speculation_with_a_draft_model_changes_nothing(
    models: dict[str, Model],
    target: str,
    draft: str,
    rows: list[tuple[int, float, float, int, Grammar | None]],
    num_blocks: int,
    stagger: int,
) -> None:
    """Greedy and sampled, penalised, constrained, drafted for at any depth or not at all, with little room, twice."""
    engines = Engines(models[target], models[draft])
    asked = []
    for number, (length, temperature, penalty, depth, grammar) in enumerate(rows):
        (one,) = requests(length, temperature=temperature, depth=max(1, depth), max_tokens=20)
        sampling = replace(one.sampling, frequency_penalty=penalty, seed=number)
        sources = ("ngram", "draft") if depth % 2 else ("draft",)
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


def test_passes_of_a_draft_model_run_from_recordings(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    if "cpu" not in linear.active:
        pytest.skip("the op provider cpu is not active")
    computed = 0
    run = ModelDrafts._pass

    def counted(self: ModelDrafts, batch: Any) -> Any:
        nonlocal computed
        computed += 1
        return run(self, batch)

    monkeypatch.setattr(ModelDrafts, "_pass", counted)
    answers, _ = laws.serve(Engines(models["target"], models["target"]), laws.Serving(), requests(20, max_tokens=60))
    assert_all_right(answers)
    stats = answers[0].end.speculation
    assert stats is not None
    # One of one token and one of two, each once for itself and once for its recording.
    assert computed <= 4 < stats.num_drafted


def test_a_draft_model_that_fails_is_dropped_and_the_answer_goes_on(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, asked = Engines(models["target"], models["draft"]), requests(20, 21)
    wanted = laws.alone(engines, off(asked))
    loop, scheduler = engines(laws.Serving())
    propose, calls = ModelDrafts.propose, 0

    def fails_later(self: ModelDrafts, *arguments: Any) -> list[torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("no more")
        return propose(self, *arguments)

    monkeypatch.setattr(ModelDrafts, "propose", fails_later)
    answers = laws.serve_on(loop, scheduler, asked)
    laws.assert_same(answers, wanted)
    for answer in answers:
        assert answer.end.speculation is not None
        assert answer.end.speculation.disabled_reason == "the draft model failed: no more"


@pytest.mark.parametrize(
    ("target", "draft", "engine", "difference", "wanted"),
    [
        ("target", "hybrid", EngineOptions(), None, "recurrent layers"),
        ("target", "draft", EngineOptions(speculation=("mtp",)), None, "the options name mtp, too"),
        ("sliding", "draft", EngineOptions(), None, "no layer of the model drafted for keeps all tokens"),
        ("target", "draft", EngineOptions(), "id 7 is another", "its vocabulary is not that of"),
        ("hybrid", "draft", EngineOptions(), None, None),
        ("windowed", "sliding", EngineOptions(), None, None),
    ],
)
def test_require_drafts_names_why_a_model_cannot_draft(
    folders: dict[str, Path],
    target: str,
    draft: str,
    engine: EngineOptions,
    difference: str | None,
    wanted: str | None,
) -> None:
    two = recognise(resolve(folders[target])), recognise(resolve(folders[draft]))
    if wanted is None:
        require_drafts(*two, engine, lambda: difference)
        return
    with pytest.raises(CapabilityUnavailable, match=wanted) as refused:
        require_drafts(*two, engine, lambda: difference)
    assert refused.value.param == "draft_model"


def test_plan_has_room_for_a_draft_model_and_a_namespace_of_its_own(folders: dict[str, Path]) -> None:
    options, engine = ModelOptions(device="cpu", kv_dtype="int8"), EngineOptions(max_rows=2)
    artifact, drafts = resolve(folders["target"]), recognise(resolve(folders["draft"]))
    alone = plan_model(artifact, options, engine, FACTS)
    both = plan_model(artifact, options, engine, FACTS, draft_model=drafts)
    cache = CacheStorage(both.specs, (5,), 2, dtype=torch.int8, device=CPU)
    held = sum(tensor.numel() * tensor.element_size() for tensor in cache.tensors())
    assert held == (5 + SPARE_BLOCKS) * both.plan.groups[0].bytes_per_block
    assert both.plan.groups[0].bytes_per_block - alone.plan.groups[0].bytes_per_block == 16 * (2 * 16 + 8)
    assert both.plan.weights_bytes > alone.plan.weights_bytes
    assert namespace_of(both, "files", ()) != namespace_of(alone, "files", ())
