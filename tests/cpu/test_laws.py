"""Every family under every law, through the whole engine: scheduler, runner, sampler and emitter."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import laws
from tests.cpu.disk_blocks import disk_cache
from tests.cpu.tiny_models import (
    CONTEXT,
    CPU,
    DENSE,
    EXPERTS,
    SMALL_HYBRID,
    VOCAB,
    load,
    random_ids,
    random_model,
    save,
)
from tests.shared_data import shared
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import CacheStorage
from troth.config.resolve import SCALE_BYTES
from troth.contracts.cache_spec import attention_groups, with_scales
from troth.contracts.grammar import Grammar
from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import DraftSourceName
from troth.models.family import Model
from troth.ops.impl import cpu
from troth.ops.layer_kv import dtype_of
from troth.ops.linear import linear
from troth.ops.short_conv import short_conv
from troth.run.batch import BatchBuilder
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.recorded import RecordedDecode
from troth.run.runner import ModelRunner
from troth.run.started import StartedDecode
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.detokenize import TokenBytes
from troth.text.grammar import GrammarCompiler
from troth.text.tokenizer import Tokenizer

SCHEMA = """{
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 20}},
    "required": ["n", "s"],
    "additionalProperties": false
}"""


def _two_layers(*kinds: str) -> dict[str, Any]:
    """One of each kind."""
    return {"num_hidden_layers": 2, "layer_types": list(kinds)}


FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**DENSE),
    "mistral": transformers.MistralConfig(**DENSE, sliding_window=20),
    "qwen2": transformers.Qwen2Config(**DENSE),
    "qwen3": transformers.Qwen3Config(**DENSE, head_dim=16),
    "gemma3": transformers.Gemma3TextConfig(
        **DENSE, head_dim=32, sliding_window=20, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    ),
    "qwen3_5": transformers.AutoConfig.for_model("qwen3_5_text", **DENSE, **SMALL_HYBRID),
    "qwen3_next": transformers.Qwen3NextConfig(
        **DENSE | SMALL_HYBRID | EXPERTS | _two_layers("linear_attention", "full_attention"), decoder_sparse_step=2
    ),
    "qwen3_5_moe": transformers.AutoConfig.for_model(
        "qwen3_5_moe_text",
        **{key: value for key, value in (DENSE | SMALL_HYBRID | EXPERTS).items() if key != "intermediate_size"}
        | _two_layers("linear_attention", "full_attention"),
    ),
    "lfm2": transformers.Lfm2Config(**DENSE | _two_layers("full_attention", "conv"), block_multiple_of=32),
}


RECURRENT = ("qwen3_5", "qwen3_next", "qwen3_5_moe", "lfm2")
IN_SHORT = "qwen3_5_moe"
"""Every layer of it is one of qwen3_next's."""


@pytest.fixture(
    scope="module", params=[*(family for family in FAMILIES if family != IN_SHORT), "gemma3 int8"], name="build"
)
def _build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> laws.BuildEngine:
    family, _, kv_name = request.param.partition(" ")
    return engines(load(save(random_model(FAMILIES[family]), tmp_path_factory.mktemp(family))), kv_name)


def engines(
    model: Model,
    kv_name: str = "",
    *,
    context_tokens: int = CONTEXT,
    tokenizer: TokenBytes | None = None,
    starts: bool = False,
) -> laws.BuildEngine:
    """Makes engines of a model as a law wants them, over a cache of this format; ``starts``: steps are left to workers
    of the pool.
    """
    kv_dtype = dtype_of(kv_name or "float32")
    specs = with_scales(model.config.cache_specs(kv_dtype.itemsize), SCALE_BYTES.get(kv_name, 0))
    groups = attention_groups(specs)
    compiler = GrammarCompiler(ByteTokenizer(), VOCAB)

    def build(serving: laws.Serving) -> tuple[EngineLoop, Scheduler]:
        limits = serving.limits(specs, context_tokens)
        cache = CacheStorage(specs, limits.num_blocks, serving.max_rows, dtype=kv_dtype, device=CPU)
        scheduler = Scheduler(limits)
        ticks = count()
        batches = BatchBuilder(groups, serving.max_rows, context_tokens)
        recorded = RecordedDecode(model, cache, batches, cpu.recording) if "cpu" in linear.active else None
        checkpoints, grammars = CheckpointStorage(cache, serving.num_checkpoints), RowGrammars(compiler)
        started = StartedDecode(recorded, batches) if starts and recorded is not None else None
        runner = ModelRunner(model, cache, batches, recorded, checkpoints, grammars, started=started)
        drafting = Drafting(scheduler, lambda: float(next(ticks)), forced_ids=grammars.forced_ids)
        folder = serving.disk_folder
        disk = (
            disk_cache(folder, scheduler, cache, checkpoints, finish_started=runner.finish_started) if folder else None
        )
        loop = EngineLoop(
            scheduler,
            runner,
            tokenizer or ByteTokenizer(),
            clock=lambda: float(next(ticks)),
            pipeline_depth=int(started is not None),
            grammars=grammars,
            disk=disk,
            drafting=drafting,
        )
        return loop, scheduler

    return build


def requests() -> list[Request]:
    """Different lengths, samplings, penalties, stops, grammars and ends."""
    plans: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
        (90, 24, {"temperature": 0.0}, {}),
        (17, 40, {"temperature": 0.9, "seed": 5}, {}),
        (1, 33, {"temperature": 1.0, "top_k": 9, "top_p": 0.8, "seed": 2**64 - 1}, {}),
        (64, 30, {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 11}, {}),
        (33, 25, {"temperature": 0.5, "presence_penalty": 1.0, "frequency_penalty": 0.7, "seed": 3}, {}),
        (48, 48, {"temperature": 1.2, "min_p": 0.05, "seed": 8}, {"eos_ids": frozenset(range(0, 131, 19))}),
        (5, 60, {"temperature": 0.8, "seed": 21, "logit_bias": ((65, 3.0), (66, 2.5))}, {"stop": ("AB", "BBA", "q")}),
        (21, 40, {"temperature": 1.0, "seed": 4}, {"grammar": Grammar(kind="json_schema", source=SCHEMA)}),
        (9, 36, {"temperature": 1.3, "seed": 6}, {"grammar": Grammar(kind="regex", source="[0-9]+", begins_after="e")}),
    ]
    return [
        Request(
            request_id=RequestId(f"r{i}"),
            prompt_ids=tuple(random_ids(num_prompt, seed=100 + i)),
            max_tokens=max_tokens,
            sampling=SamplingParams(logprobs=0, **sampling),
            **rest,
        )
        for i, (num_prompt, max_tokens, sampling, rest) in enumerate(plans)
    ]


def test_law_batched_equals_single(build: laws.BuildEngine) -> None:
    laws.batched_equals_single(build, requests())


def test_law_chunked_equals_whole(build: laws.BuildEngine) -> None:
    laws.chunked_equals_whole(build, requests())


def test_law_preempted_equals_uninterrupted(build: laws.BuildEngine) -> None:
    """Short prompts get in together and then grow past what the pool holds."""
    growing = [replace(one, prompt_ids=one.prompt_ids[:12], max_tokens=70, eos_ids=frozenset()) for one in requests()]
    laws.preempted_equals_uninterrupted(build, growing, laws.Serving(num_blocks=10))


def test_law_stream_equals_whole(build: laws.BuildEngine) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size >= VOCAB
    laws.stream_equals_whole(build, requests(), tokenizer.decode)


@pytest.mark.parametrize(
    "serving",
    [
        laws.Serving(),
        laws.Serving(max_rows=3, chunk_tokens=40, step_tokens=40, num_blocks=24, num_checkpoints=5),
    ],
    ids=["room for all", "little room"],
)
def test_law_prefix_hit_equals_cold(build: laws.BuildEngine, serving: laws.Serving) -> None:
    short = [replace(one, max_tokens=10) for one in requests()[:5]]
    laws.prefix_hit_equals_cold(build, short, serving)


def test_law_restored_equals_cold(build: laws.BuildEngine, tmp_path: Path) -> None:
    short = [replace(one, max_tokens=10) for one in requests()[:5]]
    laws.restored_equals_cold(build, short, laws.Serving(disk_folder=tmp_path))


@pytest.mark.parametrize("build", [IN_SHORT], indirect=True)
def test_laws_hold_in_short_for_experts_in_every_layer(build: laws.BuildEngine) -> None:
    some = [replace(one, prompt_ids=one.prompt_ids[:40], max_tokens=8) for one in requests()[:3]]
    laws.batched_equals_single(build, some)
    laws.chunked_equals_whole(build, some)
    laws.prefix_hit_equals_cold(build, some, laws.Serving(num_checkpoints=5))
    growing = [replace(one, prompt_ids=one.prompt_ids[:12], max_tokens=30) for one in requests()[:4]]
    laws.preempted_equals_uninterrupted(build, growing, laws.Serving(num_blocks=6))


def test_laws_hold_over_an_fp8_cache(tmp_path: Path) -> None:
    """By references: the kernels of the CPU do not know the format, which is for GPUs."""
    build = engines(load(save(random_model(FAMILIES["qwen3"]), tmp_path / "model")), "fp8")
    short = [replace(one, max_tokens=8) for one in requests()[1:4]]
    laws.batched_equals_single(build, short)
    laws.restored_equals_cold(build, short, laws.Serving(disk_folder=tmp_path / "cache"))


def test_law_prefix_hit_equals_cold_when_preempted(build: laws.BuildEngine) -> None:
    """A row that lost its blocks starts again from those that are still remembered."""
    growing = [replace(one, prompt_ids=one.prompt_ids[:12], max_tokens=70, eos_ids=frozenset()) for one in requests()]
    serving = laws.Serving(num_blocks=10, num_checkpoints=12, prompt_cache=True)
    laws.preempted_equals_uninterrupted(build, growing, serving)


SOURCES: dict[str, tuple[DraftSourceName, ...]] = {
    "external": ("external",),
    "ngram": ("ngram",),
    "all": ("grammar", "external", "ngram"),
}


@pytest.mark.parametrize(
    ("build", "sources"),
    [
        ("llama", "ngram"),
        ("gemma3", "external"),
        ("gemma3 int8", "all"),
        ("qwen3_5", "ngram"),
        ("qwen3_5", "all"),
        ("qwen3_next", "all"),
        ("qwen3_5_moe", "all"),
        ("lfm2", "all"),
    ],
    indirect=["build"],
)
def test_law_speculation_changes_nothing(build: laws.BuildEngine, sources: str) -> None:
    depth = {"external": 3, "ngram": 8, "all": 5}[sources]
    # Two tokens and no others: what three of them were followed by before is right half of the time.
    bias = SamplingParams(seed=9, frequency_penalty=0.01, logit_bias=((65, 60.0), (66, 60.0)), logprobs=0)
    babble = Request(request_id=RequestId("babble"), prompt_ids=(65, 66), max_tokens=60, sampling=bias)
    forced = Grammar(kind="choice", choices=("hello world", "hello there", "help"))
    greedy = SamplingParams(temperature=0.0, logprobs=0)
    told = Request(request_id=RequestId("told"), prompt_ids=(65,), max_tokens=20, grammar=forced, sampling=greedy)
    some = [*requests(), babble, told]
    stats, _ = laws.speculation_changes_nothing(build, some, laws.Serving(), SOURCES[sources], depth)
    assert stats.num_drafted > stats.num_accepted > 0
    assert max(stats.accepted_by_depth) > 0
    assert all(stats.num_accepted_by_source[source] > 0 for source in SOURCES[sources])


@pytest.mark.parametrize("build", ["llama", "gemma3", "qwen3_5"], indirect=True)
def test_law_speculation_changes_nothing_when_preempted_and_cached(build: laws.BuildEngine) -> None:
    growing = [replace(one, prompt_ids=one.prompt_ids[:12], max_tokens=70, eos_ids=frozenset()) for one in requests()]
    serving = laws.Serving(num_blocks=10, prompt_cache=True)
    stats, scheduler = laws.speculation_changes_nothing(build, growing, serving, ("external", "ngram"), 4)
    assert scheduler.num_preemptions > 0, "the pool was too large to preempt anybody"
    assert stats.num_accepted > 0


GRAMMARS = (None, None, Grammar(kind="json_schema", source=SCHEMA), Grammar(kind="regex", source="(abc|ab)+d?"))


@pytest.fixture(scope="module", name="build_of")
def _build_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], laws.BuildEngine]:
    return cache(lambda family: engines(load(save(random_model(FAMILIES[family]), tmp_path_factory.mktemp(family)))))


@given(
    family=st.sampled_from([*RECURRENT, "gemma3"]),
    rows=st.lists(
        st.tuples(
            st.integers(1, 40),
            st.sampled_from([0.0, 0.6, 1.0, 1.5]),
            st.integers(0, 2**64 - 1),
            st.sampled_from([0.0, 0.0, 1.0]),
            st.sampled_from(GRAMMARS),
        ),
        min_size=2,
        max_size=4,
    ),
    depth=st.integers(1, 16),
    num_blocks=st.sampled_from([5, 200]),
)
@settings(max_examples=6, deadline=None)
def test_law_speculation_changes_nothing_at_random(
    build_of: Callable[[str], laws.BuildEngine],
    family: str,
    rows: list[tuple[int, float, int, float, Grammar | None]],
    depth: int,
    num_blocks: int,
) -> None:
    """Greedy and drawn, penalised, constrained, drafted for or not, cut into chunks, with little room, twice."""
    drawn = [
        Request(
            request_id=RequestId(f"r{number}"),
            prompt_ids=tuple(random_ids(num_prompt, seed=seed % 1000)),
            max_tokens=30,
            sampling=SamplingParams(temperature=temperature, seed=seed, frequency_penalty=penalty, logprobs=1),
            grammar=grammar,
        )
        for number, (num_prompt, temperature, seed, penalty, grammar) in enumerate(rows)
    ]
    serving = laws.Serving(max_rows=3, chunk_tokens=20, step_tokens=32, num_blocks=num_blocks, prompt_cache=True)
    stats, _ = laws.speculation_changes_nothing(build_of(family), drawn, serving, SOURCES["all"], depth)
    assert stats.num_accepted > 0


@pytest.mark.parametrize(
    ("family", "source"), [("qwen3_5", "all"), ("lfm2", "external"), ("gemma3", "all"), ("llama", "all")]
)
def test_law_speculation_changes_nothing_in_bfloat16_where_logits_are_equal(
    family: str, source: str, tmp_path: Path
) -> None:
    build = engines(load(save(random_model(FAMILIES[family]), tmp_path), torch.bfloat16), "bfloat16")
    some = requests()[:6]
    # The first tokens at least: no draft was beside them. Usually half of all.
    assert laws.speculation_changes_nothing_where_logits_are_equal(build, some, SOURCES[source], 4) >= len(some)


@pytest.mark.parametrize("build", RECURRENT, indirect=True)
def test_decode_steps_of_recurrent_models_are_recorded(build: laws.BuildEngine) -> None:
    """A recording that left a state out would be refused when it is proved."""
    if "cpu" not in linear.active:
        pytest.skip("the kernels are not built")
    loop, scheduler = build(laws.Serving())
    laws.serve_on(loop, scheduler, requests()[:2])
    assert loop._runner.downgrades == ()  # type: ignore[attr-defined]


@pytest.mark.parametrize("build", ["qwen3_5"], indirect=True)
def test_law_batched_equals_single_where_an_op_is_not_recorded(build: laws.BuildEngine) -> None:
    """A recording leaves PyTorch's convolution out: it is refused, and leaves nothing behind."""
    if "cpu" not in linear.active:
        pytest.skip("the kernels are not built")
    before = short_conv.active
    short_conv.activate(("torch",))
    try:
        laws.batched_equals_single(build, requests())
        loop, scheduler = build(laws.Serving())
        laws.serve_on(loop, scheduler, requests()[:2])
        (said,) = loop._runner.downgrades  # type: ignore[attr-defined]
    finally:
        short_conv.activate(before)
    assert said.startswith("decode steps are not recorded: ")


def test_law_batched_equals_single_where_kernels_do_not_take_a_product(tmp_path: Path) -> None:
    """Recordings left it out and passed their proof: its first result stayed, right for the step of the proof."""
    if "cpu" not in linear.active:
        pytest.skip("the kernels are not built")
    odd = transformers.Qwen3Config(**{**DENSE, "intermediate_size": 80}, head_dim=16)
    build = engines(load(save(random_model(odd), tmp_path)))
    short = [replace(one, max_tokens=8) for one in requests()[1:4]]
    laws.batched_equals_single(build, short)
    loop, scheduler = build(laws.Serving())
    laws.serve_on(loop, scheduler, short)
    (said,) = loop._runner.downgrades  # type: ignore[attr-defined]
    assert said.startswith("decode steps are not recorded: ")


@pytest.mark.e2e
def test_law_speculation_changes_nothing_for_a_trained_hybrid() -> None:
    folder = shared("troth-tiny-hybrid")
    golden = json.loads((folder / "golden.json").read_text())
    build = engines(load(folder, context_tokens=1024), context_tokens=1024, tokenizer=Tokenizer.from_folder(folder))
    some = [
        Request(
            request_id=RequestId(f"p{prompt['id']}"),
            prompt_ids=tuple(prompt["prompt_ids"]),
            max_tokens=32,
            eos_ids=frozenset(golden["eos_token_ids"]),
            sampling=SamplingParams(temperature=temperature, seed=3, logprobs=0),
        )
        for prompt, temperature in zip(golden["prompts"][4:9], cycle((0.0, 0.0, 0.8)), strict=False)
    ]
    serving = laws.Serving(prompt_cache=True, chunk_tokens=64)
    stats, _ = laws.speculation_changes_nothing(build, some, serving, ("external", "ngram"), 3)
    assert stats.num_drafted > stats.num_accepted > 50
