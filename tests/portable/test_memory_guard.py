"""Following the process's memory: the prompt cache makes room first, then new requests are refused, and it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.portable.test_pins import FULL, GREEDY, LIMITS, Sink, runner_for, text
from troth.contracts.events import Completed, Failed
from troth.contracts.memory_plan import MemoryPlan, MemoryStatus
from troth.contracts.names import BlockId, RequestId
from troth.contracts.request import Request
from troth.errors import OptionError
from troth.run.engine import EngineLoop
from troth.run.memory_guard import Marks, MemoryGuard, memory_marks
from troth.schedule import invariants
from troth.schedule.replay import RecordingScheduler, replay
from troth.testing.byte_tokenizer import ByteTokenizer

BLOCK = FULL.bytes_per_block
BASE = 10_000
PLAN = MemoryPlan(
    device="cpu",
    dtype="float32",
    weights_bytes=400,
    groups=(),
    state_bytes=0,
    transient_bytes=100,
    reserve_bytes=100,
    usable_bytes=1000,
    context_tokens=96,
    declared_context_tokens=96,
    max_rows=1,
)


class Machine:
    """A process that holds a page for each block that was ever written, until it is given back."""

    def __init__(self, *, soft: int, hard: int) -> None:
        self.trace: list[str] = []
        self.scheduler = RecordingScheduler(LIMITS, self.trace.append)
        self.touched: set[int] = set()
        self.leaked = 0
        guard = MemoryGuard(self.scheduler, Marks(soft, hard), self.read, self.give_back)
        self.loop = EngineLoop(self.scheduler, runner_for(LIMITS), ByteTokenizer(), clock=lambda: 0.0, memory=guard)
        self._num_requests = 0

    def read(self) -> int:
        return BASE + self.leaked + len(self.touched) * BLOCK

    def give_back(self, block_ids: Sequence[Sequence[BlockId]]) -> None:
        assert not self.scheduler.num_in_flight, "a step under way may still read them"
        self.touched -= set(block_ids[0])

    def ask(self, ids: Sequence[int], *, pin: str | None = None) -> Completed | Failed:
        self._num_requests += 1
        sink, name = Sink(), RequestId(f"r{self._num_requests}")
        self.loop.add(Request(request_id=name, prompt_ids=tuple(ids), sampling=GREEDY, max_tokens=1, pin=pin), sink)
        while self.loop.step():
            pool = self.scheduler.pools[0]
            self.touched |= {i for i in range(pool.num_blocks) if i not in set(pool.free_ids)}
        self.loop.follow_memory()
        invariants.check(self.scheduler)
        return sink.end

    @property
    def memory(self) -> MemoryStatus:
        found = self.loop.status("ready", ()).memory
        assert found is not None
        return found


def test_memory_below_the_soft_mark_costs_the_cache_nothing() -> None:
    machine = Machine(soft=BASE + 12 * BLOCK, hard=BASE + 20 * BLOCK)
    for number in range(4):
        machine.ask(text(30 * number, 80))
    assert machine.memory.num_shed_blocks == 0
    assert machine.scheduler.pools[0].num_cached == 12


def test_memory_above_the_soft_mark_takes_cached_blocks_the_oldest_first() -> None:
    machine = Machine(soft=BASE + 6 * BLOCK, hard=BASE + 20 * BLOCK)
    machine.ask(text(1, 48))
    machine.ask(text(100, 64))
    assert machine.memory.num_shed_blocks == 1
    assert machine.read() <= BASE + 6 * BLOCK
    assert machine.memory.held_bytes == machine.read()
    newer, older = machine.ask([*text(100, 64), 1]), machine.ask([*text(1, 48), 1])
    assert isinstance(newer, Completed)
    assert isinstance(older, Completed)
    assert (newer.usage.num_cached_tokens, older.usage.num_cached_tokens < 48) == (64, True)
    assert replay(machine.trace) == len(machine.trace) - 1


def test_memory_of_free_blocks_is_given_back_before_anything_is_forgotten() -> None:
    machine = Machine(soft=BASE + 6 * BLOCK, hard=BASE + 20 * BLOCK)
    machine.ask(text(1, 80))
    machine.touched = set(range(12))
    machine.loop.follow_memory()
    assert machine.touched == set(range(12)) - set(machine.scheduler.pools[0].free_ids)
    assert machine.memory.num_shed_blocks == 0


def test_memory_above_the_hard_mark_refuses_until_it_is_less() -> None:
    machine = Machine(soft=BASE + 6 * BLOCK, hard=BASE + 8 * BLOCK)
    machine.ask(text(1, 48), pin="kept")
    machine.leaked = 9 * BLOCK
    machine.loop.follow_memory()
    refused = machine.ask(text(1, 48))
    assert isinstance(refused, Failed)
    assert (refused.kind, refused.retry_after_s) == ("Busy", 5.0)
    assert f"holds {machine.read()} bytes of memory, {BASE + 8 * BLOCK} are allowed" in refused.message
    guard = machine.loop._memory
    assert guard is not None
    (downgrade,) = guard.downgrades
    assert downgrade.startswith("memory: this engine holds")
    assert machine.memory.num_refused == 1
    machine.leaked = 0
    machine.loop.follow_memory()
    assert guard.downgrades == ()
    served = machine.ask([*text(1, 48), 1])
    assert isinstance(served, Completed)
    assert served.usage.num_cached_tokens == 48, "a pin is not forgotten"


class Device:
    """A device whose pools are there from the start; its allocator keeps what steps took."""

    def __init__(self, *, soft: int, hard: int) -> None:
        self.scheduler = RecordingScheduler(LIMITS, lambda line: None)
        self.kept = self.leaked = self.num_emptied = 0
        guard = MemoryGuard(self.scheduler, Marks(soft, hard), self.read, self.give_back, frees_blocks=False)
        self.loop = EngineLoop(self.scheduler, runner_for(LIMITS), ByteTokenizer(), clock=lambda: 0.0, memory=guard)

    def read(self) -> int:
        return BASE + LIMITS.num_blocks[0] * BLOCK + self.kept + self.leaked

    def give_back(self, block_ids: Sequence[Sequence[BlockId]]) -> None:
        self.num_emptied += 1
        self.kept = 0

    def ask(self, ids: Sequence[int]) -> Completed | Failed:
        sink = Sink()
        name = RequestId(f"r{len(ids)}-{ids[0]}")
        self.loop.add(Request(request_id=name, prompt_ids=tuple(ids), sampling=GREEDY, max_tokens=1), sink)
        while self.loop.step():
            pass
        self.loop.follow_memory()
        return sink.end


def test_memory_of_a_device_is_given_back_without_forgetting_what_would_free_nothing() -> None:
    """Twice a second all cached blocks were forgotten, and the device held as much as before."""
    pools = BASE + LIMITS.num_blocks[0] * BLOCK
    device = Device(soft=pools + 100, hard=pools + 200)
    device.ask(text(1, 80))
    assert device.num_emptied == 0
    device.kept = 150
    device.loop.follow_memory()
    assert (device.num_emptied, device.read()) == (1, pools)
    device.leaked = 150
    device.loop.follow_memory()
    again = device.ask([*text(1, 80), 5])
    assert isinstance(again, Completed)
    assert again.usage.num_cached_tokens == 80
    device.leaked = 250
    device.loop.follow_memory()
    refused = device.ask(text(9, 40))
    assert isinstance(refused, Failed)
    assert refused.kind == "Busy"
    status = device.loop.status("ready", ()).memory
    assert status is not None
    assert (status.held_bytes, status.num_shed_blocks, status.num_refused) == (pools + 250, 0, 1)
    device.leaked = 0
    device.loop.follow_memory()
    assert isinstance(device.ask(text(9, 40)), Completed)


def test_memory_that_cannot_be_read_is_left_alone() -> None:
    scheduler = RecordingScheduler(LIMITS, lambda line: None)
    guard = MemoryGuard(scheduler, Marks(1, 2), lambda: None, lambda ids: pytest.fail("nothing is known"))
    guard.follow()
    guard.require_room()
    assert guard.status() == MemoryStatus(held_bytes=0, soft_bytes=1, hard_bytes=2)


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (None, None, Marks(5950, 6000)),
        (None, 3000, Marks(2700, 3000)),
        (2000, 3000, Marks(2000, 3000)),
        (2000, None, Marks(2000, 6000)),
        (9000, None, Marks(9000, 9000)),
    ],
)
def test_memory_marks_follow_the_plan_where_nobody_says_otherwise(
    soft: int | None, hard: int | None, expected: Marks
) -> None:
    assert memory_marks(PLAN, 5000, soft, hard) == expected
    most = 5000 + PLAN.total_bytes - PLAN.reserve_bytes
    full = replace(PLAN, weights_bytes=800)
    assert full.fits
    assert 5000 + full.total_bytes - full.reserve_bytes <= memory_marks(full, 5000, None, None).soft
    assert most < memory_marks(PLAN, 5000, None, None).soft


def test_memory_marks_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(OptionError, match="memory_soft_bytes 4 is above memory_hard_bytes 3"):
        memory_marks(PLAN, 0, 4, 3)
