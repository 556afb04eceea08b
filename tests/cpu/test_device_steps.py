"""Steps as a GPU runs them: tables on the device, replayed decodes, tokens read one step late. Here the device is the
CPU, and a replay runs the step again; what may differ from the ordinary way of serving is nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import laws
from tests.cpu.captured_steps import run_again
from tests.cpu.draft_heads import HeadEngines, Reference, load_with_head, save_with_head
from tests.cpu.test_head_drafts import check_drafts
from tests.cpu.test_head_drafts import requests as head_requests
from tests.cpu.test_laws import FAMILIES, requests
from tests.cpu.tiny_models import CONTEXT, CPU, VOCAB, load, random_ids, random_model, save
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import RecurrentSpec, StateTensor, attention_groups
from troth.contracts.names import BLOCK_TOKENS, BlockId, RequestId, Row
from troth.contracts.plan import NO_SAMPLE, ON_DEVICE, BlockUpdate, StepPlan
from troth.contracts.speculation import Speculation
from troth.models.family import Model
from troth.nn.batch import Batch
from troth.ops import registry
from troth.run import graphs
from troth.run.batch import BatchBuilder
from troth.run.capture import Capture, Computed
from troth.run.device_batch import DeviceBatches
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.graphs import DecodeGraphs, row_counts, table_widths
from troth.run.head_graphs import HeadGraphs
from troth.run.recorded_passes import RecordedPasses
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


def forgets(run: Callable[[], Computed]) -> tuple[Callable[[], None], Computed]:
    """A capture that leaves everything out."""
    return lambda: None, [result.clone() for result in run()]


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
            why = "recurrent layers compute no padding without triton" if cache.states else None
            decodes = DecodeGraphs(
                model, cache, batches, run_again, max_rows=serving.max_rows, context_tokens=CONTEXT, refusal=why
            )
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
        lambda serving: make(serving, device=True), requests()[4:8], serving, ("grammar", "external", "ngram"), 4
    )
    assert stats.num_drafted > stats.num_accepted > 0


def test_a_head_s_captured_passes_draft_the_reference_s_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length, shorter than a block, too, with other depths; they come one after the other, and again."""
    folder = save_with_head(tmp_path)
    engines = HeadEngines(load_with_head(folder), capture=run_again)
    run, ways = HeadGraphs.run, Counter[bool]()

    def noted(self: HeadGraphs, *arguments: Any) -> list[Tensor] | None:
        made = run(self, *arguments)
        ways[made is not None] += 1
        return made

    monkeypatch.setattr(HeadGraphs, "run", noted)
    asked = head_requests(40, 3, 16, 70, max_tokens=20)
    for number, depth in enumerate((3, 1, 8, 4)):
        asked[number] = replace(asked[number], speculation=Speculation(sources=("mtp",), depth=depth, adaptive=False))
    loop, scheduler = engines(laws.Serving(max_rows=3, prompt_cache=True))
    wanted, _ = laws.serve(engines, laws.Serving(), [replace(one, speculation=None) for one in asked])
    for _ in range(2):
        answers = laws.serve_on(loop, scheduler, asked, stagger=1)
        laws.assert_same(answers, wanted)
    check_drafts(Reference(folder), engines.drafted, asked, answers)
    assert ways[True] > 20
    graphs: Any = loop._runner._made._proposer._graphs  # type: ignore[attr-defined]
    assert graphs._first.records, "what was kept did not run again as it did"
    assert graphs._next.records


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("llama")))


def decode_plan(step: int, rows: list[int], starts: list[int], token_ids: list[int]) -> StepPlan:
    plan = StepPlan(step, [Row(row) for row in rows], [RequestId(str(row)) for row in rows], starts)
    plan.num_new, plan.num_draft, plan.num_decodes = [1] * len(rows), [0] * len(rows), len(rows)
    plan.token_ids, plan.sample_steps = token_ids, [3] * len(rows)
    return plan


def verify_plan(step: int, rows: list[int], starts: list[int], num_new: list[int], seed: int = 0) -> StepPlan:
    """Rows of one token first."""
    plan = decode_plan(step, rows, starts, random_ids(sum(num_new), seed))
    plan.num_new, plan.num_draft = num_new, [count - 1 for count in num_new]
    plan.num_decodes = num_new.count(1)
    plan.num_verifies = len(rows) - plan.num_decodes
    return plan


def decoding(model: Model, capture: Capture) -> tuple[DecodeGraphs, DeviceBatches, CacheStorage]:
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


def test_graphs_write_once_more_what_a_refused_replay_wrote(model: Model) -> None:
    """The row's keys and values stayed what the bad replay had made of them."""
    caches: list[CacheStorage] = []

    def spoils(run: Callable[[], Computed]) -> tuple[Callable[[], None], Computed]:
        results = [result.clone() for result in run()]

        def replay() -> None:
            for kv in caches[0].kv.values():
                kv.k_NKDS[1, :, :, 4], kv.v_NKSD[1, :, 4] = torch.nan, torch.nan

        return replay, results

    sides = []
    for capture in (spoils, run_again):
        torch.manual_seed(0)
        decodes, _, cache = decoding(model, capture)
        caches.append(cache)
        sides.append(decodes.logits(decode_plan(1, [0, 1], [20, 7], [5, 6])))
        assert (decodes.refusal is not None) == (capture is spoils)
    for spoilt, whole in zip(caches[0].kv.values(), caches[1].kv.values(), strict=True):
        assert torch.equal(spoilt.k_NKDS, whole.k_NKDS)
        assert torch.equal(spoilt.v_NKSD, whole.v_NKSD)
    assert sides[0] is not None
    assert sides[1] is not None
    assert torch.equal(*sides)


@pytest.mark.parametrize("capture", [forgets, run_again])
def test_passes_that_do_not_run_again_are_computed_call_by_call(capture: Capture) -> None:
    def refill(kept: Tensor, inputs: Tensor) -> None:
        kept.copy_(inputs)

    passes = RecordedPasses(lambda inputs: (inputs + 1, inputs * 2), Tensor.clone, refill, capture)
    for number in range(3):
        more, twice = passes.computed("one", torch.full((2,), float(number)))
        assert (more.tolist(), twice.tolist()) == ([number + 1] * 2, [2 * number] * 2)
    assert passes.records == (capture is run_again)


class Counting:
    """A model whose states count the steps of each row, and whose logits do not tell."""

    def forward(self, batch: Batch, cache: CacheStorage) -> Tensor:
        (state,) = cache.states[0]
        state[batch.rows.row_R[batch.rows.context_len_R > 0]] += 1
        return torch.zeros(len(batch.token_ids_T), 4)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return torch.zeros(len(hidden_TD), 7)


@pytest.mark.parametrize("steps_of_replay", [0, 1, 2])
def test_graphs_prove_states_too_and_put_them_right_when_refused(steps_of_replay: int) -> None:
    cache = CacheStorage(
        (RecurrentSpec(layers=(0,), tensors=(StateTensor((2,), 4),)),), (), 3, dtype=torch.float32, device=CPU
    )
    cache.states[0][0].fill_(5)

    def replays(run: Callable[[], Computed]) -> tuple[Callable[[], None], Computed]:
        results = run()

        def replay() -> None:
            results[0].zero_()
            for _ in range(steps_of_replay):
                run()

        return replay, results

    batches = DeviceBatches((), 3, CONTEXT, CPU)
    counting: Any = Counting()
    decodes = DecodeGraphs(counting, cache, batches, replays, max_rows=3, context_tokens=CONTEXT)
    assert decodes.logits(decode_plan(1, [0, 2], [20, 7], [5, 6])) is not None
    assert (decodes.refusal is None) == (steps_of_replay == 1)
    assert cache.states[0][0].tolist() == [[6, 6], [5, 5], [6, 6]]


def test_graphs_verify_any_drafts_by_few_captures_as_ordinary_steps_do(model: Model) -> None:
    """Rows with drafts and without, fewer than the capture's: logits, hidden states, keys and values are the same."""
    torch.manual_seed(0)
    decodes, _, cache = decoding(model, run_again)
    torch.manual_seed(0)
    _, batches, other = decoding(model, run_again)
    plans = [
        verify_plan(1, [0, 1, 2], [20, 7, 12], [1, 3, 4]),
        verify_plan(2, [2, 0, 1], [14, 21, 8], [1, 2, 3], seed=1),
        verify_plan(3, [1, 2, 0], [9, 15, 22], [2, 4, 4], seed=2),
        verify_plan(4, [2, 0, 1], [16, 23, 10], [1, 1, 3], seed=3),
    ]
    plans[-1].sample_steps[1] = NO_SAMPLE
    for plan in plans:
        got = decodes.logits(plan)
        batch = batches.build(plan)
        hidden = model.forward(batch, other)
        assert got is not None
        assert decodes.hidden_TD is not None
        torch.testing.assert_close(got, model.logits(hidden[batch.sample_S]))
        torch.testing.assert_close(decodes.hidden_TD, hidden)
    blocks = CONTEXT // BLOCK_TOKENS
    assert list(decodes._captured) == [(4, 8, 4, blocks), (4, 16, 4, blocks)]
    for layer, kv in cache.kv.items():  # all but the spare block, where the keys of padding go without triton
        torch.testing.assert_close(kv.k_NKDS[:-1], other.kv[layer].k_NKDS[:-1])
        torch.testing.assert_close(kv.v_NKSD[:-1], other.kv[layer].v_NKSD[:-1])


def test_graphs_take_the_token_on_the_device_beside_rows_with_drafts(model: Model) -> None:
    decodes, batches, _ = decoding(model, run_again)
    plan = verify_plan(1, [0, 1], [20, 7], [1, 3])
    known = decodes.logits(plan)
    assert known is not None
    known = known.clone()
    batches.note_sampled([Row(0), Row(1), Row(1), Row(1)], torch.tensor([plan.token_ids[0], 9, 9, 9]))
    plan.token_ids[0] = ON_DEVICE
    late = decodes.logits(plan)
    assert late is not None
    assert torch.equal(late, known)


@pytest.mark.parametrize(("num_new", "captured"), [([8, 8], True), ([2, 9], False), ([1, 8], True)])
def test_graphs_capture_no_steps_with_long_drafts(
    model: Model, monkeypatch: pytest.MonkeyPatch, num_new: list[int], captured: bool
) -> None:
    monkeypatch.setattr(graphs, "MOST_DRAFT_TOKENS", 16)
    decodes, _, _ = decoding(model, run_again)
    assert (decodes.logits(verify_plan(1, [0, 1], [20, 7], num_new)) is not None) == captured
    assert decodes.logits(verify_plan(2, [0, 1, 2], [20, 7, 9], [1, 8, 8])) is None


def test_graphs_give_the_hidden_states_of_the_step_itself_when_its_replay_is_wrong(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft head was fed what the replay had left: its keys went into shared blocks."""
    computed: list[Tensor] = []
    forward = model.forward

    def noted(batch: Batch, cache: CacheStorage) -> Tensor:
        computed.append(forward(batch, cache))
        return computed[-1]

    def errs(run: Callable[[], Computed]) -> tuple[Callable[[], None], Computed]:
        results = run()

        def replay() -> None:
            computed[-1].fill_(torch.nan)

        return replay, results

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
