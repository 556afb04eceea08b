"""Decode steps that workers compute while the host goes on: they differ in nothing from steps that are waited for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import laws
from tests.cpu.test_laws import FAMILIES, SCHEMA, engines
from tests.cpu.tiny_models import CPU, VOCAB, load, random_ids, random_model, save
from troth.cache.block_memory import BlockMemory
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.host_copies import HostCopies
from troth.cache.storage import CacheStorage
from troth.contracts.events import Failed, Segment
from troth.contracts.names import BlockId, CheckpointId, RequestId, Row
from troth.contracts.request import Grammar, Request
from troth.contracts.sampling import SamplingParams
from troth.errors import DeviceError
from troth.ops.all_finite import all_finite
from troth.ops.impl import cpu, cpu_steps
from troth.ops.linear import linear as linear_op
from troth.ops.linear import pack
from troth.run.emit import Emitter
from troth.run.engine import EngineLoop
from troth.run.readback import NOT_FINITE
from troth.run.started import StartedDecode, StartedTokens

pytestmark = pytest.mark.skipif(bool(cpu.unavailable()), reason="the kernels are not built")

Build = Callable[[bool], laws.BuildEngine]
NO_ROWS = torch.empty(0, dtype=torch.int64)


@pytest.fixture(params=[1, 2, 4], autouse=True, ids=lambda threads: f"{threads} threads")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    cpu.start(request.param)
    yield
    cpu.start(torch.get_num_threads())


@pytest.fixture(autouse=True)
def _told_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments have the tokens of requests that ask for no log-probabilities, too: those wait for their host."""
    make = Emitter.__init__

    def make_telling(self: Emitter, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._wants_logprobs = True

    monkeypatch.setattr(Emitter, "__init__", make_telling)


@pytest.fixture(scope="module", params=["llama", "gemma3 int8", "qwen3_5"], name="build")
def _build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Build:
    family, _, kv_name = request.param.partition(" ")
    model = load(save(random_model(FAMILIES[family]), tmp_path_factory.mktemp(family)))
    return lambda starts: engines(model, kv_name, starts=starts)


@pytest.fixture(name="started")
def _started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that was started."""
    rows: list[int] = []
    start = StartedDecode.start

    def noted(self: StartedDecode, plan: Any, sampler: Any) -> Any:
        rows.append(len(plan.rows))
        return start(self, plan, sampler)

    monkeypatch.setattr(StartedDecode, "start", noted)
    return rows


def plain() -> list[Request]:
    """Different lengths, samplings, stops and ends; nothing that the host looks at before the next step."""
    plans: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
        (90, 24, {"temperature": 0.0}, {}),
        (17, 40, {"temperature": 0.9, "seed": 5}, {}),
        (1, 33, {"temperature": 1.0, "top_k": 9, "top_p": 0.8, "seed": 2**64 - 1}, {}),
        (48, 48, {"temperature": 1.2, "min_p": 0.05, "seed": 8}, {"eos_ids": frozenset(range(0, VOCAB, 19))}),
        (5, 60, {"temperature": 0.8, "seed": 21}, {"stop": ("AB", "B", "q")}),
        (12, 1, {"temperature": 0.0}, {}),
        (14, 2, {"temperature": 0.7, "xtc_probability": 0.5, "xtc_threshold": 0.05, "seed": 1}, {}),
    ]
    return [
        Request(
            request_id=RequestId(f"r{i}"),
            prompt_ids=tuple(random_ids(num_prompt, seed=100 + i)),
            max_tokens=max_tokens,
            sampling=SamplingParams(**sampling),
            **rest,
        )
        for i, (num_prompt, max_tokens, sampling, rest) in enumerate(plans)
    ]


def looked_at() -> list[Request]:
    """Of each reason why a step waits for its host, one."""
    plans: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (9, {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 11}, {}),
        (30, {"temperature": 0.8, "seed": 2, "logit_bias": ((65, 3.0), (66, 2.5))}, {}),
        (20, {"temperature": 0.0, "logprobs": 2}, {}),
        (21, {"temperature": 1.0, "seed": 4}, {"grammar": Grammar(kind="json_schema", source=SCHEMA)}),
    ]
    return [
        Request(
            request_id=RequestId(f"l{i}"),
            prompt_ids=tuple(random_ids(num_prompt, seed=200 + i)),
            max_tokens=12,
            sampling=SamplingParams(**sampling),
            **rest,
        )
        for i, (num_prompt, sampling, rest) in enumerate(plans)
    ]


@pytest.mark.parametrize("stagger", [0, 3])
def test_law_started_steps_equal_awaited_steps(build: Build, started: list[int], stagger: int) -> None:
    some = [*plain(), *looked_at()]
    awaited = laws.serve(build(False), laws.Serving(), some, stagger=stagger)[0]
    assert not started
    laws.assert_same(laws.serve(build(True), laws.Serving(), some, stagger=stagger)[0], awaited)
    laws.assert_same(laws.alone(build(True), some), awaited)
    assert {1, 2} <= set(started)


@pytest.mark.parametrize("build", ["lfm2"], indirect=True)
def test_steps_with_code_between_their_operations_are_awaited(build: Build, started: list[int]) -> None:
    some = plain()[:3]
    laws.assert_same(laws.alone(build(True), some), laws.alone(build(False), some))
    assert not started


def test_law_started_steps_under_pressure_equal_awaited_steps(build: Build, started: list[int]) -> None:
    """Few blocks, small chunks and the prompt cache: rows are preempted, admitted again and share what they can."""
    growing = [replace(one, prompt_ids=one.prompt_ids[:12], max_tokens=70, eos_ids=frozenset()) for one in plain()]
    serving = laws.Serving(num_blocks=10, num_checkpoints=12, prompt_cache=True, max_rows=5)
    awaited = laws.serve(build(False), serving, growing, stagger=1)[0]
    answers, scheduler = laws.serve(build(True), serving, growing, stagger=1)
    assert scheduler.num_preemptions > 0
    assert started
    laws.assert_same(answers, awaited)


def test_law_prefix_hit_equals_cold_where_steps_are_started(build: Build, started: list[int]) -> None:
    some = [replace(one, max_tokens=10) for one in plain()[:4]]
    laws.prefix_hit_equals_cold(build(True), some, laws.Serving(num_blocks=24, num_checkpoints=5))
    assert started


def test_law_restored_equals_cold_where_steps_are_started(build: Build, started: list[int], tmp_path: Path) -> None:
    some = [replace(one, max_tokens=10) for one in plain()[:4]]
    laws.restored_equals_cold(build(True), some, laws.Serving(disk_folder=tmp_path))
    assert started


def test_law_speculation_changes_nothing_where_steps_are_started(build: Build, started: list[int]) -> None:
    stats, _ = laws.speculation_changes_nothing(
        build(True), [*plain()[:5], *looked_at()], laws.Serving(), ("grammar", "external", "ngram"), 4
    )
    assert stats.num_drafted > stats.num_accepted > 0
    assert started


def test_rows_cancelled_and_cut_while_their_step_is_under_way_leave_the_others_alone(build: Build) -> None:
    some = plain()
    awaited = laws.alone(build(False), some)
    loop, scheduler = build(True)(laws.Serving(prompt_cache=True, num_blocks=40))
    under_way = 0
    for number in range(6):
        gone = replace(some[number % 3], request_id=RequestId(f"gone{number}"), max_tokens=50)
        loop.add(gone, laws.Collector())
        for _ in range(2 + number):
            loop.step()
        under_way += len(loop._in_flight)
        loop.cancel(gone.request_id, "requested")
        kept = [replace(one, request_id=RequestId(f"{one.request_id}-{number}")) for one in some[number : number + 2]]
        laws.assert_same(laws.serve_on(loop, scheduler, kept), awaited[number : number + 2])
    assert under_way >= 3


def test_a_row_without_finite_logits_fails_alone(build: Build, started: list[int]) -> None:
    """Its next step is under way by then, fed with whatever was drawn."""
    some = [replace(one, eos_ids=frozenset(), stop=(), max_tokens=40) for one in plain()[:4]]
    awaited = laws.alone(build(False), some)
    loop, scheduler = build(True)(laws.Serving())
    collectors = [laws.Collector() for _ in some]
    for one, collector in zip(some, collectors, strict=True):
        loop.add(one, collector)
    while not started:
        loop.step()
    state = scheduler.state_of(some[1].request_id)
    assert state is not None
    spoil(loop, state.row, int(state.tables[0].block_ids[0]))
    while loop.step():
        pass
    end = collectors[1].events[-1]
    assert isinstance(end, Failed)
    assert "not finite" in end.message
    del collectors[1], awaited[1]
    laws.assert_same([collector.answer() for collector in collectors], awaited)


def spoil(loop: EngineLoop, row: Row, block_id: int) -> None:
    """Make what a row reads of its beginning NaN."""
    runner: Any = loop._runner
    runner.finish_started()
    for kv in runner._cache.kv.values():
        scales = kv.v_scale_NKS
        (kv.v_NKSD if scales is None else scales)[block_id] = torch.nan
    for states in runner._cache.states.values():
        for state in states:
            state[row] = torch.nan


def test_an_engine_closes_while_steps_are_under_way(build: Build) -> None:
    under_way = 0
    for num_steps in range(3, 9):
        loop, _ = build(True)(laws.Serving())
        collectors = [laws.Collector() for _ in range(3)]
        for one, collector in zip(plain(), collectors, strict=False):
            loop.add(one, collector)
        for _ in range(num_steps):
            loop.step()
        under_way += len(loop._in_flight)
        loop.close(DeviceError("closed"))
        assert all(isinstance(collector.events[-1], Failed) for collector in collectors)
    assert under_way >= 3


def test_a_token_is_there_before_the_step_that_computes_the_next(build: Build) -> None:
    """What is computed in the caller's own time must not keep an earlier step's tokens waiting."""
    loop, _ = build(True)(laws.Serving())
    first, second = laws.Collector(), laws.Collector()
    loop.add(plain()[1], first)
    while sum(isinstance(event, Segment) for event in first.events) < 4:
        loop.step()
    assert len(loop._in_flight) == 1
    loop.add(plain()[0], second)
    loop.step()  # a prompt, which nobody computes aside
    assert not loop._in_flight
    assert sum(len(event.tokens) for event in first.events if isinstance(event, Segment)) >= 5


def test_programs_run_in_order_and_before_what_their_thread_computes_itself() -> None:
    """More of them than there is room for; each adds to what the one before left."""
    torch.manual_seed(0)
    weight = pack([torch.randn(64, 64) / 8.0], torch.float32, CPU)
    x_TI = torch.randn(1, 64)
    inputs = torch.empty(1, 64)
    with cpu.recording() as tape:
        for _ in range(3):
            product_TI = linear_op(inputs, weight)
            cpu_steps.feed(as_bytes(product_TI), as_bytes(inputs), NO_ROWS, NO_ROWS, NO_ROWS)
    expected = x_TI
    for _ in range(11 * 3):
        expected = linear_op(expected, weight)
    for _ in range(20):
        inputs.copy_(x_TI)
        programs = [cpu.start_program(tape) for _ in range(11)]
        computed = linear_op(inputs, weight)  # behind all of them
        assert torch.equal(computed, linear_op(expected, weight))
        assert all(program.is_finished for program in programs)
        programs[3].finish()
        assert torch.equal(inputs, expected)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(-1)


def test_an_op_that_one_thread_computes_waits_for_programs_too() -> None:
    weight = pack([torch.randn(512, 512)], torch.float32, CPU)
    inputs = torch.randn(8, 512)
    with cpu.recording() as tape:
        for _ in range(20):
            product_TI = linear_op(inputs, weight)
    for _ in range(20):
        product_TI.fill_(0.0)
        inputs.fill_(torch.nan)
        cpu.start_program(tape)
        assert not all_finite(product_TI[:1]).any()


def test_a_program_that_nobody_waits_for_keeps_what_it_needs() -> None:
    def start() -> None:
        weight, inputs = pack([torch.randn(512, 512)], torch.float32, CPU), torch.randn(8, 512)
        with cpu.recording() as tape:
            for _ in range(200):
                linear_op(inputs, weight)
        cpu.start_program(tape)

    for _ in range(10):
        start()
        torch.full((8, 512), torch.nan)
        gc.collect()
    program = cpu.start_program(_small_tape())
    assert len(cpu._state.programs) > 1
    program.finish()
    assert not cpu._state.programs


def _small_tape() -> cpu.Tape:
    with cpu.recording() as tape:
        cpu_steps.note(torch.tensor([1]), torch.tensor([0]), torch.zeros(1, dtype=torch.int64))
    return tape


def test_a_step_whose_stages_cannot_be_made_fails_alone(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the engine: stages were made while it was asked whether a step would be started."""
    some = plain()[:2]
    loop, scheduler = build(True)(laws.Serving())

    def fails(*_: object) -> None:
        raise MemoryError

    collectors = [laws.Collector() for _ in some]
    with monkeypatch.context() as patch:
        patch.setattr(StartedDecode, "_new_stage", fails)
        for one, collector in zip(some, collectors, strict=True):
            loop.add(one, collector)
        while loop.step():
            pass
    assert all(isinstance(collector.events[-1], Failed) for collector in collectors)
    again = [replace(one, request_id=RequestId(f"{one.request_id}-again")) for one in some]
    laws.assert_same(laws.serve_on(loop, scheduler, again), laws.alone(build(False), some))


def test_steps_with_block_tables_too_large_to_stage_are_awaited(
    build: Build, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troth.run.started.MOST_STAGED_BYTES", 64)
    some = plain()[:2]
    laws.assert_same(laws.alone(build(True), some), laws.alone(build(False), some))
    assert not started


def test_tokens_of_rows_that_are_not_finite_are_not_told() -> None:
    last_token = torch.zeros(2, dtype=torch.int64)
    with cpu.recording() as tape:
        cpu_steps.note(torch.tensor([7, 8]), torch.tensor([1, 0]), last_token)
    tokens = StartedTokens(cpu.start_program(tape), torch.tensor([7, 8]), torch.tensor([True, False]))
    assert tokens.tokens() == [7, NOT_FINITE]
    assert tokens.is_here
    assert last_token.tolist() == [8, 7]


def test_what_reads_and_writes_caches_besides_steps_waits_for_them(build: Build) -> None:
    runner: Any = build(True)(laws.Serving())[0]._runner
    waits: list[int] = []
    cache: CacheStorage = runner._cache
    checkpoints: CheckpointStorage = runner._checkpoints
    copies = HostCopies(cache, checkpoints, lambda: waits.append(1))
    copies.write_blocks(0, [BlockId(1)], copies.read_blocks(0, [BlockId(0)]))
    assert len(waits) == 2
    if checkpoints.saved:
        copies.write_state(CheckpointId(1), copies.read_state(CheckpointId(0)))
        assert len(waits) == 4
    waits.clear()
    BlockMemory(cache, CPU, lambda: waits.append(1)).give_back([[BlockId(0)]])
    assert len(waits) == 1
