"""What the prompt cache serves, shares, gives up and counts, through a scheduler and a runner that notices errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.portable.test_scheduler import FULL, WINDOW, limits
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.plan import NO_SAMPLE, StepPlan, StepResult
from troth.contracts.prefix_cache import PrefixCacheStatus
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.schedule import invariants
from troth.schedule.block_table import BlockTable
from troth.schedule.prefix_index import PrefixIndex
from troth.schedule.scheduler import Scheduler
from troth.testing.fake_runner import FakeRunner, expected_answer

EOS = 999


def ids(num_tokens: int, first: int = 0) -> tuple[int, ...]:
    """Tokens of one text: the same beginning for any length."""
    return tuple((first * 131 + 7 * i) % 900 for i in range(num_tokens))


class World:
    """A scheduler with a prompt cache, asked one request after the other or several at once."""

    def __init__(
        self,
        groups: tuple[AttentionSpec, ...] = (FULL,),
        *,
        recurrent: bool = False,
        num_checkpoints: int = 32,
        depth: int = 0,
        **changes: object,
    ) -> None:
        values: dict[str, object] = {"num_blocks": (200,) * len(groups), "checkpoint_interval_tokens": 512}
        self.limits = limits(
            groups=groups,
            prompt_cache=True,
            num_checkpoints=num_checkpoints if recurrent else None,
            checkpoint_bytes=1000 if recurrent else 0,
            **values | changes,
        )
        self.scheduler = Scheduler(self.limits)
        self.recurrent = recurrent
        self.depth = depth
        self.runner = FakeRunner(groups, self.limits.num_blocks, recurrent=recurrent)
        self.num_asked = 0
        self.flights: list[tuple[StepPlan, StepResult]] = []
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.pinned: list[BlockTable] = []

    @property
    def index(self) -> PrefixIndex:
        assert self.scheduler.prefix_index is not None
        return self.scheduler.prefix_index

    @property
    def status(self) -> PrefixCacheStatus:
        return self.index.status()

    def add(self, prompt: Sequence[int], most: int = 4, **values: object) -> Request:
        one = Request(
            request_id=RequestId(f"r{self.num_asked}"),
            prompt_ids=tuple(prompt),
            max_tokens=most,
            **values,  # type: ignore[arg-type]
        )
        self.num_asked += 1
        self.scheduler.add(one)
        return one

    def step(self, *failures: int) -> bool:
        plan = self.scheduler.plan(0.0)
        invariants.check(self.scheduler, pinned=self.pinned)
        if plan is not None:
            for admission in plan.admissions:
                self.cached.setdefault(admission.request.request_id, admission.num_cached_tokens)
            self.flights.append((plan, self.runner.launch(plan).result()))
        if not self.flights or (plan is not None and len(self.flights) <= self.depth):
            return plan is not None
        result = self.flights.pop(0)[1]
        result.failures |= dict.fromkeys(failures, "not finite")
        for outcome in self.scheduler.commit(result):
            self.answers.setdefault(outcome.request_id, []).extend(outcome.token_ids)
        invariants.check(self.scheduler, pinned=self.pinned)
        return True

    def run(self) -> None:
        while self.step():
            pass

    def ask(self, prompt: Sequence[int], most: int = 4, **values: object) -> int:
        """Serve one request to its end, check its answer; how many of its tokens were cached."""
        one = self.add(prompt, most, **values)
        self.run()
        groups = self.limits.groups
        assert self.answers[one.request_id] == expected_answer(one, most, groups=groups, recurrent=self.recurrent)
        return self.cached[one.request_id]

    def said(self) -> list[int]:
        """The last answer."""
        return self.answers[f"r{self.num_asked - 1}"]


def test_prefix_second_turn_computes_only_what_is_new() -> None:
    world = World()
    assert world.ask(ids(100), most=10) == 0
    # Of 110 tokens the last was never fed: its block is not whole.
    assert world.ask([*ids(100), *world.said(), 1, 2, 3]) == 96
    assert world.runner.num_tokens == 109 + (113 - 96) + 3


def test_prefix_answer_that_ends_at_a_block_edge_is_whole() -> None:
    """The last token of an answer is fed once more when that completes a block."""
    world = World()
    world.ask(ids(100), most=12)
    assert world.ask([*ids(100), *world.said(), 1]) == 112


def test_prefix_hit_leaves_one_token_to_compute() -> None:
    world = World()
    world.ask(ids(64))
    assert world.ask(ids(64)) == 48
    assert world.ask(ids(65)) == 64
    assert world.ask(ids(16)) == 0


def test_prefix_retries_and_shared_beginnings_keep_hitting() -> None:
    """Publishing one conversation consumes no other (the pool holds all of them)."""
    world = World()
    system = ids(80)
    conversations = [[*system, *ids(50, first)] for first in range(1, 5)]
    assert [world.ask(one) for one in conversations] == [0, 80, 80, 80]
    assert [world.ask(one) for one in conversations] == [128, 128, 128, 128]
    assert [world.ask([*one, 1, 2, 3]) for one in conversations] == [128, 128, 128, 128]
    assert world.ask([*system, 5]) == 80


def test_prefix_many_conversations_keep_one_copy_of_their_system_prompt() -> None:
    world = World(context_tokens=4096, num_blocks=(512,))
    system = ids(2000)
    for first in range(1, 33):
        world.ask([*system, *ids(40, first)])
    num_blocks = world.status.num_blocks[0]
    own = 32 * ((2000 + 40 + 3) // BLOCK_TOKENS - 2000 // BLOCK_TOKENS)
    assert num_blocks == 2000 // BLOCK_TOKENS + own
    assert world.status.cached_bytes == num_blocks * FULL.bytes_per_block


def test_prefix_is_shared_with_a_request_still_running() -> None:
    world = World(max_rows=2)
    world.add(ids(200), most=30)
    for _ in range(5):
        world.step()
    second = world.add(ids(200), most=30)
    world.run()
    assert world.cached[second.request_id] == 192
    assert world.answers["r0"] == world.answers["r1"]


@pytest.mark.parametrize("depth", [0, 1])
def test_prefix_equal_requests_side_by_side_end_up_with_one_copy(depth: int) -> None:
    """Neither prompt has a whole block, the answers have the same; the second's are given back as it publishes."""
    world = World(depth=depth)
    for _ in range(2):
        world.add(ids(10), most=200)
    for _ in range(180):
        world.step()
    assert world.cached == {"r0": 0, "r1": 0}
    tables = [state.tables[0].block_ids for state in world.scheduler.states()]
    assert tables[0][0] == tables[1][0]
    assert tables[0][-1] != tables[1][-1]
    world.run()
    assert world.answers["r0"] == world.answers["r1"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("recurrent", [False, True])
def test_prefix_requests_that_arrive_together_compute_what_they_share_once(depth: int, recurrent: bool) -> None:
    world = World(depth=depth, recurrent=recurrent, step_tokens=1000, chunk_tokens=200, max_rows=8)
    for number in range(4):
        world.add([*ids(160), *ids(20, number)], checkpoint_positions=(160,), boundary=175)
    other = world.add(ids(100, 9))
    world.step()
    # What shares nothing with a prompt under way does not wait for it.
    assert set(world.cached) == {"r0", other.request_id}
    world.run()
    assert [world.cached[f"r{number}"] for number in range(4)] == [0, 160, 160, 160]
    for number in range(4):
        assert len(world.answers[f"r{number}"]) == 4


def test_prefix_cache_off_neither_reads_nor_writes() -> None:
    world = World()
    world.ask(ids(100), prompt_cache=False)
    assert world.status.num_blocks == (0,)
    world.ask(ids(100))
    before = world.status
    assert world.ask(ids(100), prompt_cache=False) == 0
    after = world.status
    assert after.num_blocks == before.num_blocks
    assert after.num_hit_tokens == before.num_hit_tokens
    assert after.num_admissions == {"off": 2, "miss": 1}


def test_prefix_namespaces_share_nothing() -> None:
    world = World()
    world.ask(ids(100))
    assert world.ask(ids(100), namespace="salt") == 0
    assert world.ask(ids(100), namespace="salt") == 96


def test_prefix_prompt_logprobs_are_computed_and_still_published() -> None:
    world = World()
    wants = SamplingParams(prompt_logprobs=1)
    world.ask(ids(100))
    one = world.add(ids(100), sampling=wants)
    world.run()
    assert world.cached[one.request_id] == 0
    assert world.status.num_admissions == {"miss": 1, "prompt_logprobs": 1}
    assert world.ask(ids(100)) == 96


def test_prefix_failed_row_leaves_nothing_behind() -> None:
    """Nor do blocks it published before it failed, though others may have begun to use them."""
    world = World()
    world.ask(ids(40))
    world.add([*ids(40), *ids(100, 3)], most=20)
    world.step()
    world.step()
    sharing = world.add([*ids(40), *ids(100, 3), 5], most=20)
    world.step()
    assert world.cached[sharing.request_id] == 128
    world.step(0)
    world.run()
    assert world.ask([*ids(40), *ids(100, 3)]) == 32
    assert len(world.answers[sharing.request_id]) == 20


def test_prefix_failed_step_leaves_nothing_behind() -> None:
    world = World()
    world.add(ids(200), most=5)
    world.step()
    world.scheduler.plan(0.0)
    world.scheduler.fail_step("the device went away")
    invariants.check(world.scheduler)
    assert world.status.num_blocks == (0,)
    assert world.index.nodes() == []


def test_prefix_cancelled_prefill_keeps_its_whole_committed_blocks() -> None:
    world = World()
    one = world.add(ids(200), most=5)
    world.step()
    world.step()
    world.scheduler.finish(one.request_id, num_emitted=0)
    invariants.check(world.scheduler)
    assert world.ask(ids(200)) == 128


def test_prefix_eviction_takes_the_oldest_tail_first() -> None:
    world = World(num_blocks=(20,), context_tokens=300)
    world.ask([*ids(32), *ids(64, 1)])
    world.ask([*ids(32), *ids(64, 2)])
    # 2 shared blocks and 4 of each; one more conversation needs 11 of 20.
    world.ask(ids(160, 3))
    assert world.ask([*ids(32), *ids(64, 2), 1]) == 96
    assert world.ask([*ids(32), *ids(64, 1), 1]) < 96
    assert world.status.num_evicted_blocks > 0


def test_prefix_chain_is_as_fresh_as_the_end_it_lost() -> None:
    """A cancelled prompt gives its newest blocks back; what is left of it was used just now all the same."""
    world = World(recurrent=True, num_blocks=(20,), context_tokens=300)
    world.ask(ids(64, 1), boundary=48)
    one = world.add(ids(200, 2), boundary=64)
    for _ in range(2):
        world.step()
    world.scheduler.finish(one.request_id, num_emitted=0)
    world.ask(ids(210, 3))
    assert world.status.num_evicted_blocks > 0
    assert world.ask([*ids(64, 2), 1, 2]) == 64


def test_prefix_recency_moves_only_with_use() -> None:
    """A request that looked and had to wait has not used what it found."""
    world = World(num_blocks=(16,), context_tokens=256, max_rows=2)
    world.ask(ids(48, 1))
    world.ask(ids(48, 2))
    world.add(ids(150, 3), most=20)
    world.step()
    waiting = world.add([*ids(48, 1), *ids(100, 4)], most=4)
    world.step()
    assert waiting.request_id not in world.cached
    assert world.status.num_admissions == {"miss": 3}
    world.run()
    assert world.answers[waiting.request_id]


def test_prefix_pins_outlast_pressure() -> None:
    world = World((FULL, WINDOW), recurrent=True, num_blocks=(24, 24), context_tokens=300, num_checkpoints=4)
    world.ask(ids(80), boundary=64)
    assert world.index.pin("", ids(30, 9)) is None
    pin = world.index.pin("", ids(80))
    assert pin is not None
    place, world.pinned = pin
    assert place.node.depth == 80 // BLOCK_TOKENS
    for first in range(1, 6):
        world.ask(ids(200, first))
    assert world.ask([*ids(80), 1, 2]) == 80
    world.index.unpin(place, world.pinned)
    world.pinned = []
    for first in range(1, 6):
        world.ask(ids(280, first))
    assert world.ask([*ids(80), 1, 2]) == 0


def test_prefix_window_keeps_what_a_conversation_comes_back_to() -> None:
    """Under pressure the sliding window's blocks in mid-text go, those before the ends of turns stay."""
    world = World((FULL, WINDOW), num_blocks=(200, 16))
    world.ask(ids(200), boundary=197)
    assert world.ask([*ids(200), *world.said(), 1, 2], boundary=200) == 192
    for first in range(1, 4):
        world.ask(ids(150, first), boundary=147)
    assert world.ask([*ids(200), 7, 8, 9], boundary=200) == 192


def test_prefix_window_keeps_the_boundary_behind_a_long_answer() -> None:
    """A template that drops what was answered comes back there."""
    world = World((FULL, WINDOW), num_blocks=(200, 16))
    world.ask(ids(100), most=60, boundary=97)
    for first in range(1, 4):
        world.ask(ids(150, first), boundary=147)
    assert world.ask([*ids(97), 7, 8, 9]) == 96


def test_prefix_window_that_was_given_up_is_counted_by_name() -> None:
    world = World((FULL, WINDOW), num_blocks=(200, 12))
    world.ask(ids(200))
    for first in range(1, 4):
        world.ask(ids(150, first))
    # Half-way nobody was expected; the blocks of full attention are all there.
    assert world.ask([*ids(100), 7, 8, 9]) < 96
    assert world.status.num_admissions["window_lost"] == 1
    assert world.status.num_refused_tokens["window_lost"] > 0


def test_prefix_recurrent_hit_needs_a_checkpoint() -> None:
    world = World(recurrent=True)
    world.ask(ids(200), boundary=190, checkpoint_positions=(50,))
    # Full attention agrees up to 96; the last saved state before it is at the end of the system prompt.
    assert world.ask([*ids(100), 1, 2, 3]) == 48
    assert world.status.num_admissions["no_checkpoint"] == 1
    assert world.status.num_refused_tokens == {"no_checkpoint": 48}


def test_prefix_recurrent_second_turn_starts_at_the_end_of_the_answer() -> None:
    world = World(recurrent=True)
    world.ask(ids(200), most=39, boundary=190)
    assert world.ask([*ids(200), *world.said(), 1, 2, 3]) == 224
    # The conversation before the generation prompt, with another answer than the one that was given:
    assert world.ask([*ids(190), *ids(30, 5)]) == 176


def test_prefix_recurrent_saves_at_intervals_for_what_agrees_in_part() -> None:
    world = World(recurrent=True, checkpoint_interval_tokens=64)
    world.ask(ids(300))
    assert world.ask([*ids(150), 1, 2, 3]) == 128


def test_prefix_recurrent_answer_keeps_one_checkpoint_of_its_own() -> None:
    """Each block edge of an answer is saved; an earlier one is given back when the next is there."""
    world = World(recurrent=True)
    world.ask(ids(40), most=200, boundary=32)
    assert world.status.num_checkpoints == 2
    assert world.status.num_checkpoints_free == 30


def test_prefix_recurrent_tail_without_checkpoint_is_given_back() -> None:
    """Blocks that nothing can be restored from are not worth their memory."""
    world = World(recurrent=True)
    one = world.add(ids(300), boundary=64)
    for _ in range(3):
        world.step()
    assert world.scheduler.pools[0].num_used * BLOCK_TOKENS == 192
    world.scheduler.finish(one.request_id, num_emitted=0)
    assert world.status.num_blocks[0] * BLOCK_TOKENS == 64


def test_prefix_recurrent_checkpoints_of_turns_outlast_those_in_mid_text() -> None:
    world = World(recurrent=True, num_checkpoints=4, checkpoint_interval_tokens=32)
    world.ask(ids(100), boundary=96, checkpoint_positions=(48,))
    world.ask(ids(200, 2), most=2, boundary=16)
    assert world.status.num_evicted_checkpoints > 0
    assert world.ask([*ids(96), 1, 2, 3]) == 96


def test_prefix_without_room_for_states_is_no_cache() -> None:
    scheduler = Scheduler(limits(prompt_cache=True, num_checkpoints=0))
    assert scheduler.prefix_index is None


def test_prefix_preempted_request_resumes_from_what_it_published() -> None:
    world = World(num_blocks=(13,))
    for first in range(1, 4):
        world.add(ids(40, first), most=60)
    world.run()
    assert world.scheduler.num_preemptions > 0
    assert world.status.num_hit_tokens > 0
    assert set(world.cached.values()) == {0}


def test_prefix_status_counts_what_admissions_got() -> None:
    world = World(recurrent=True)
    world.ask(ids(100), boundary=96)
    world.ask(ids(100), boundary=96)
    world.ask(ids(50, 2))
    status = world.status
    assert status.num_admissions == {"miss": 2, "hit": 1}
    assert status.num_hit_tokens == 96
    blocks = status.num_blocks[0]
    assert status.cached_bytes == blocks * FULL.bytes_per_block + status.num_checkpoints * 1000


def test_plan_saves_after_the_step_that_reaches_the_edge() -> None:
    world = World(recurrent=True)
    world.add(ids(100), boundary=90)
    plan = world.scheduler.plan(0.0)
    assert plan is not None
    assert plan.num_new == [64]
    assert plan.saves == []
    world.scheduler.commit(StepResult(plan.step_id, [[]]))
    plan = world.scheduler.plan(0.0)
    assert plan is not None
    assert (plan.starts, plan.num_new, plan.sample_steps) == ([64], [16], [NO_SAMPLE])
    assert [copy.row for copy in plan.saves] == plan.rows
