"""Steps as a GPU runs them: tables on the device, replayed decodes, tokens read one step late. Here the device is the
CPU, and a replay runs the step again; what may differ from the ordinary way of serving is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import laws
from tests.cpu.test_laws import FAMILIES, requests
from tests.cpu.tiny_models import CONTEXT, CPU, VOCAB, load, random_model, save
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups
from troth.contracts.names import BLOCK_TOKENS, BlockId, RequestId, Row
from troth.contracts.plan import NO_SAMPLE, ON_DEVICE, BlockUpdate, StepPlan
from troth.models.family import Model
from troth.nn.batch import Batch
from troth.ops import registry
from troth.run import graphs
from troth.run.batch import BatchBuilder
from troth.run.device_batch import DeviceBatches
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.graphs import DecodeGraphs, row_counts, table_widths
from troth.run.runner import ModelRunner
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.grammar import GrammarCompiler


@pytest.fixture(scope="module", autouse=True)
def _providers_of_a_gpu() -> Iterator[None]:
    """The kernels of the CPU know no padding."""
    registry.activate(("torch",))
    yield
    registry.activate()


def run_again(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A capture that runs the step again, into the same result."""
    result = run().clone()

    def replay() -> None:
        result.copy_(run())

    return replay, result


def forgets(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A capture that leaves everything out."""
    return lambda: None, run().clone()


Make = Callable[..., tuple[EngineLoop, Scheduler]]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_5"], name="make")
def _make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    model = load(save(random_model(FAMILIES[request.param]), tmp_path_factory.mktemp(request.param)))
    specs = model.config.cache_specs(4)
    groups = attention_groups(specs)
    compiler = GrammarCompiler(ByteTokenizer(), VOCAB)

    def make(serving: laws.Serving, *, device: bool, depth: int = 1) -> tuple[EngineLoop, Scheduler]:
        limits = serving.limits(specs, CONTEXT)
        cache = CacheStorage(specs, limits.num_blocks, serving.max_rows, dtype=torch.float32, device=CPU)
        scheduler = Scheduler(limits)
        grammars = RowGrammars(compiler)
        checkpoints = CheckpointStorage(cache, serving.num_checkpoints)
        batches: Any = (
            DeviceBatches(groups, serving.max_rows, CONTEXT, CPU)
            if device
            else BatchBuilder(groups, serving.max_rows, CONTEXT)
        )
        decodes = None
        if device:
            decodes = DecodeGraphs(model, cache, batches, run_again, max_rows=serving.max_rows, context_tokens=CONTEXT)
            if cache.states:
                decodes.refusal = "recurrent layers compute no padding without triton"
        runner = ModelRunner(model, cache, batches, decodes, checkpoints, grammars)
        ticks = count()
        loop = EngineLoop(
            scheduler,
            runner,
            ByteTokenizer(),
            clock=lambda: float(next(ticks)),
            pipeline_depth=depth if device else 0,
            grammars=grammars,
            drafting=Drafting(scheduler, lambda: float(next(ticks)), forced_ids=grammars.forced_ids),
        )
        return loop, scheduler

    return make


@pytest.mark.parametrize("depth", [0, 1])
def test_device_steps_equal_host_steps(make: Make, depth: int) -> None:
    host = laws.serve(lambda serving: make(serving, device=False), laws.Serving(), requests(), stagger=3)[0]
    device = laws.serve(lambda serving: make(serving, device=True, depth=depth), laws.Serving(), requests(), stagger=3)
    laws.assert_same(device[0], host)


def test_device_steps_equal_host_steps_under_pressure(make: Make) -> None:
    """Few blocks, small chunks and the prompt cache: rows are preempted, admitted again and share what they can."""
    small = laws.Serving(num_blocks=14, chunk_tokens=32, step_tokens=48, prompt_cache=True, max_rows=5)
    host = laws.serve(lambda serving: make(serving, device=False), small, requests(), stagger=1)[0]
    device = laws.serve(lambda serving: make(serving, device=True), small, requests(), stagger=1)[0]
    laws.assert_same(device, host)


@pytest.mark.parametrize("make", ["gemma3"], indirect=True)
def test_device_steps_verify_drafts_beside_a_step_under_way(make: Make) -> None:
    """Rows with drafts wait for their commits; the others go on a step ahead of theirs."""
    serving = laws.Serving(num_blocks=24, prompt_cache=True)
    stats, _ = laws.speculation_changes_nothing(
        lambda serving: make(serving, device=True), requests(), serving, ("grammar", "external", "ngram"), 4
    )
    assert stats.num_drafted > stats.num_accepted > 0


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("llama")))


def decode_plan(step: int, rows: list[int], starts: list[int], token_ids: list[int]) -> StepPlan:
    plan = StepPlan(step, [Row(row) for row in rows], [RequestId(str(row)) for row in rows], starts)
    plan.num_new, plan.num_draft, plan.num_decodes = [1] * len(rows), [0] * len(rows), len(rows)
    plan.token_ids, plan.sample_steps = token_ids, [3] * len(rows)
    return plan


def decoding(model: Model, capture: graphs.Capture) -> tuple[DecodeGraphs, DeviceBatches, CacheStorage]:
    """Three rows with two blocks each, of random keys and values."""
    specs = model.config.cache_specs(4)
    cache = CacheStorage(specs, (9,), 6, dtype=torch.float32, device=CPU)
    for kv in cache.kv.values():
        kv.k_NKDS.normal_()
        kv.v_NKSD.normal_()
    batches = DeviceBatches(attention_groups(specs), 6, CONTEXT, CPU)
    first = StepPlan(0)
    first.block_updates = [BlockUpdate(Row(row), 0, 0, [BlockId(2 * row), BlockId(2 * row + 1)]) for row in range(3)]
    batches.follow(first)
    return DecodeGraphs(model, cache, batches, capture, max_rows=6, context_tokens=CONTEXT), batches, cache


def test_graphs_pad_without_touching_blocks_of_rows(model: Model) -> None:
    decodes, _, cache = decoding(model, run_again)
    before = {layer: (kv.k_NKDS.clone(), kv.v_NKSD.clone()) for layer, kv in cache.kv.items()}
    logits = decodes.logits(decode_plan(1, [0, 1, 2], [20, 7, 30], [5, 6, 7]))
    assert logits is not None
    assert logits.shape == (3, VOCAB)
    changed = {
        (block, slot)
        for layer, (k, _) in before.items()
        for block, slot in (cache.kv[layer].k_NKDS != k).any(dim=2).any(dim=1).nonzero().tolist()
    }
    spare = len(next(iter(before.values()))[0]) - 1
    assert {place for place in changed if place[0] != spare} == {(1, 4), (2, 7), (5, 14)}


def test_graphs_refuse_a_capture_that_leaves_something_out(model: Model) -> None:
    decodes, _, _ = decoding(model, forgets)
    kept, _, _ = decoding(model, run_again)
    plan = decode_plan(1, [0, 1], [20, 7], [5, 6])
    torch.manual_seed(0)
    first = decodes.logits(plan)
    assert first is not None
    assert first.isfinite().all(), "the step that was captured still counts"
    assert decodes.refusal is not None
    assert "replay" in decodes.refusal
    assert decodes.logits(plan) is None
    assert kept.logits(plan) is not None
    assert kept.refusal is None


def test_graphs_give_the_hidden_states_of_the_step_itself_when_its_replay_is_wrong(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft head was fed what the replay had left: its keys went into shared blocks."""
    computed: list[Tensor] = []
    forward = model.forward

    def noted(batch: Batch, cache: CacheStorage) -> Tensor:
        computed.append(forward(batch, cache))
        return computed[-1]

    def errs(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = run()

        def replay() -> None:
            computed[-1].fill_(torch.nan)

        return replay, result

    monkeypatch.setattr(model, "forward", noted)
    decodes, _, _ = decoding(model, errs)
    assert decodes.logits(decode_plan(1, [0, 1], [20, 7], [5, 6])) is not None
    assert decodes.refusal is not None
    assert decodes.hidden_TD is not None
    assert torch.equal(decodes.hidden_TD, computed[0][:2])


def test_graphs_take_the_token_on_the_device(model: Model) -> None:
    decodes, batches, _ = decoding(model, run_again)
    known = decodes.logits(decode_plan(1, [0, 1], [20, 7], [5, 6]))
    assert known is not None
    known = known.clone()
    batches.note_sampled([Row(0), Row(1)], torch.tensor([5, 6]))
    late = decodes.logits(decode_plan(2, [0, 1], [20, 7], [ON_DEVICE, ON_DEVICE]))
    assert late is not None
    assert torch.equal(late, known)


def test_graphs_give_logits_of_sampled_rows_alone(model: Model) -> None:
    decodes, batches, _ = decoding(model, run_again)
    whole = decodes.logits(decode_plan(1, [0, 1, 2], [20, 7, 30], [5, 6, 7]))
    assert whole is not None
    whole = whole.clone()
    plan = decode_plan(2, [0, 1, 2], [20, 7, 30], [5, 6, 7])
    plan.sample_steps[1] = NO_SAMPLE
    logits = decodes.logits(plan)
    assert logits is not None
    assert torch.equal(logits, whole[[0, 2]])
    batches.note_sampled([Row(0), Row(2)], torch.tensor([70, 72]))
    assert batches.last_token[:3].tolist() == [70, 0, 72]


def test_graphs_are_captured_for_few_numbers_of_rows_and_widths() -> None:
    assert row_counts(1) == [1]
    assert row_counts(6) == [1, 2, 4, 6]
    assert row_counts(40) == [1, 2, 4, 8, 16, 32, 40]
    assert table_widths(3) == [3]
    assert table_widths(64) == [64]
    assert table_widths(2000) == [64, 256, 1024, 2000]
    assert BLOCK_TOKENS * table_widths(2000)[0] == 1024
