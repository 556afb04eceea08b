"""Drafts in the batch: whatever is proposed, and however often, answers are those without it.

The runner's answers depend on every token it reads back, so a rejected draft that left a trace would show.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.portable.test_prefix_laws import Conversations
from tests.portable.test_scheduler import FULL, WINDOW, Loop, limits, request
from tests.portable.test_scheduler_force import CLOSE, expected
from troth.contracts.cache_spec import TRAIL_TOKENS, AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.plan import StepPlan
from troth.contracts.request import Request
from troth.schedule import invariants
from troth.schedule.row_prefix import TAIL_TOKENS
from troth.schedule.scheduler import Scheduler
from troth.testing.fake_runner import FakeRunner, expected_answer

GROUPS = (FULL, WINDOW)
TOPOLOGIES: dict[str, tuple[tuple[AttentionSpec, ...], bool]] = {
    "full": ((FULL,), False),
    "sliding": ((WINDOW,), False),
    "both": (GROUPS, False),
    "recurrent": ((), True),
    "all": (GROUPS, True),
}
"""Cache groups, and whether rows have a state besides."""
ONE = RequestId("a")


def right_answer(one: Request, groups: tuple[AttentionSpec, ...] = GROUPS, *, recurrent: bool = False) -> list[int]:
    assert one.max_tokens is not None
    return expected_answer(one, one.max_tokens, groups=groups, recurrent=recurrent)


def propose(scheduler: Scheduler, one: Request, answer: Sequence[int], num_right: int, num_wrong: int) -> None:
    """Draft the next tokens of the right answer, and wrong ones behind them."""
    state = scheduler.state_of(one.request_id)
    if state is not None:
        known = len(state.output_ids)
        right = list(answer[known : known + num_right])
        scheduler.draft(one.request_id, right + [997] * num_wrong)


@pytest.mark.parametrize(("num_right", "num_wrong"), [(0, 3), (3, 0), (2, 2), (8, 0), (16, 16)])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("recurrent", [False, True])
def test_scheduler_takes_right_drafts_and_no_wrong_ones(
    recurrent: bool, depth: int, num_right: int, num_wrong: int
) -> None:
    num_checkpoints = 8 if recurrent else None
    loop = Loop(limits(groups=GROUPS, num_blocks=(64, 64), num_checkpoints=num_checkpoints), depth, recurrent=recurrent)
    one = request("a", 30, 61)
    answer = right_answer(one, recurrent=recurrent)
    loop.scheduler.add(one)
    num_steps = 0
    while True:
        propose(loop.scheduler, one, answer, num_right, num_wrong)
        if not loop.step():
            break
        num_steps += 1
    assert loop.answers[ONE] == answer
    assert loop.ends[ONE] == "length"
    plans = [plan for plan in loop.plans if isinstance(plan, StepPlan)]
    most_right = min(num_right, TRAIL_TOKENS) if recurrent else num_right
    assert len(plans) <= 3 + -(-60 // (most_right + 1))
    verified = sum(sum(plan.num_draft) for plan in plans)
    assert verified >= min(60, most_right)


def test_scheduler_plans_decodes_before_verifies_before_prompts() -> None:
    loop = Loop(limits(groups=GROUPS, num_blocks=(64, 64)))
    requests = [request(name, 20, 40) for name in "abc"]
    for one in requests:
        loop.scheduler.add(one)
    while not all(loop.answers.get(one.request_id) for one in requests):
        loop.step()
    for one in (requests[0], requests[2]):
        propose(loop.scheduler, one, right_answer(one), 2, 1)
    loop.scheduler.add(request("d", 20, 40))
    loop.step()
    plan = loop.plans[-1]
    assert isinstance(plan, StepPlan)
    assert plan.request_ids == ["b", "a", "c", "d"]
    assert (plan.num_decodes, plan.num_verifies, plan.num_exact) == (1, 2, 9)
    assert (plan.num_new, plan.num_draft) == ([1, 4, 4, 20], [0, 3, 3, 0])
    assert plan.drafts_of(1) == [*right_answer(requests[0])[1:3], 997]
    assert plan.sample_steps == [1, 1, 1, 0]
    loop.run()
    assert all(loop.answers[one.request_id] == right_answer(one) for one in requests)


def test_scheduler_cuts_drafts_to_what_a_step_may_sample() -> None:
    loop = Loop(limits(groups=GROUPS, num_blocks=(64, 64), max_samples=6))
    requests = [request(name, 5, 40) for name in "abc"]
    for one in requests:
        loop.scheduler.add(one)
    loop.step()
    for one in requests:
        propose(loop.scheduler, one, right_answer(one), 2, 0)
    loop.step()
    plan = loop.plans[-1]
    assert isinstance(plan, StepPlan)
    assert plan.request_ids == ["c", "a", "b"]
    assert plan.num_draft == [0, 2, 1]
    loop.run()
    assert all(loop.answers[one.request_id] == right_answer(one) for one in requests)


def test_scheduler_takes_no_blocks_from_others_for_drafts() -> None:
    loop = Loop(limits(num_blocks=(2,)))
    one = request("a", 10, 20)
    loop.scheduler.add(one)
    other = request("b", 10, 6)
    loop.scheduler.add(other)
    loop.step()
    assert loop.scheduler.num_running == 1, "the pool holds one of them"
    loop.scheduler.finish(RequestId("b"))
    answer = right_answer(one, (FULL,))
    while loop.step():
        propose(loop.scheduler, one, answer, 16, 0)
        invariants.check(loop.scheduler)
    assert loop.answers[ONE] == answer
    assert loop.scheduler.num_preemptions == 0


def test_scheduler_gives_rows_that_are_no_longer_drafted_for_back_to_the_pipeline() -> None:
    loop = Loop(limits(), depth=1)
    one = request("a", 10, 30)
    loop.scheduler.add(one)
    for _ in range(4):
        loop.step()
    loop.scheduler.draft(ONE, [])
    assert loop.scheduler.num_in_flight == 1
    assert loop.scheduler.plan(0.0) is None, "its last token is under way"
    loop.scheduler.draft(ONE, None)
    assert loop.step()
    loop.run()
    assert loop.answers[ONE] == right_answer(one, (FULL,))


def test_scheduler_commits_accepted_drafts_but_not_the_end_of_an_answer() -> None:
    scheduler = Scheduler(limits())
    runner = FakeRunner((FULL,), (64,), answer_length=lambda request: 6)
    one = request("a", 10, 30, eos_ids=frozenset({999}))
    scheduler.add(one)
    answer = expected_answer(one, 30, groups=(FULL,), answer_length=lambda request: 6)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.commit(runner.launch(plan).result())
    state = scheduler.state_of(ONE)
    assert state is not None
    scheduler.draft(ONE, [*answer[1:6], 5, 5])
    plan = scheduler.plan(0.0)
    assert plan is not None
    (outcome,) = scheduler.commit(runner.launch(plan).result())
    assert list(outcome.token_ids) == answer[1:]
    assert (outcome.finish, outcome.num_drafted, outcome.num_accepted) == ("stop", 7, 5)
    assert state.committed_ids == [*one.prompt_ids, *answer[:-1]]
    assert scheduler.plan(0.0) is None
    assert scheduler.is_idle


@pytest.mark.parametrize("recurrent", [False, True])
def test_scheduler_force_cuts_what_was_drawn_behind_it(recurrent: bool) -> None:
    num_checkpoints = 8 if recurrent else None
    loop = Loop(limits(groups=GROUPS, num_blocks=(64, 64), num_checkpoints=num_checkpoints), recurrent=recurrent)
    one = request("a", 12, 5)
    loop.scheduler.add(one)
    loop.step()
    answer = right_answer(one, recurrent=recurrent)
    propose(loop.scheduler, one, answer, 4, 0)
    loop.step()
    assert loop.answers[ONE] == answer
    assert loop.ends[ONE] == "length"
    loop.scheduler.force(ONE, CLOSE[:2], num_emitted=3)
    state = loop.scheduler.state_of(ONE)
    assert state is not None, "an end with several tokens may still be cut"
    assert state.output_ids == [*answer[:3], *CLOSE[:2]]
    loop.answers[ONE] = []
    loop.run()
    assert [*answer[:3], *CLOSE[:2], *loop.answers[ONE]] == expected(one, 3, CLOSE[:2], recurrent=recurrent)
    assert loop.scheduler.is_idle


def test_scheduler_saves_states_of_answers_although_drafts_hardly_end_at_block_edges() -> None:
    """Drafts stop before an edge when the last checkpoint is far behind; a next turn starts from there."""
    loop = Loop(
        limits(groups=(FULL,), prompt_cache=True, num_checkpoints=8, checkpoint_interval_tokens=512), recurrent=True
    )
    one = request("a", 20, 150)
    answer = right_answer(one, (FULL,), recurrent=True)
    loop.scheduler.add(one)
    while True:
        propose(loop.scheduler, one, answer, 4, 0)
        if not loop.step():
            break
    assert loop.answers[ONE] == answer
    plans = [plan for plan in loop.plans if isinstance(plan, StepPlan)]
    assert len(plans) <= 2 + 150 // 5 + 3, "hardly a step is cut"
    next_turn = Request(request_id=RequestId("b"), prompt_ids=(*one.prompt_ids, *answer, 1, 2, 3), max_tokens=5)
    loop.scheduler.add(next_turn)
    loop.run()
    assert loop.answers[RequestId("b")] == right_answer(next_turn, (FULL,), recurrent=True)
    (admission,) = (one for plan in loop.plans[len(plans) :] for one in plan.admissions)  # type: ignore[attr-defined]
    assert admission.num_cached_tokens >= 170 - TAIL_TOKENS - 2 * BLOCK_TOKENS


class Drafted(Conversations):
    """Conversations for whose rows somebody drafts: right tokens, wrong ones, or both."""

    groups: tuple[AttentionSpec, ...] = GROUPS
    recurrent = False

    def draft(self, number: int, num_right: int, num_wrong: int) -> None:
        one = self.requests.get(f"r{number}")
        if one is not None:
            assert one.max_tokens is not None
            answer = expected_answer(
                one, one.max_tokens, groups=self.groups, answer_length=self.length_of, recurrent=self.recurrent
            )
            propose(self.scheduler, one, answer, num_right, num_wrong)

    def stop_drafting(self, number: int) -> None:
        self.scheduler.draft(RequestId(f"r{number}"), None)

    def step(self) -> bool:
        for number, one in enumerate(self.requests.values()):
            if number % 3:
                self.draft(number, (number + len(self.answers.get(one.request_id, ()))) % 5, number % 2)
        return super().step()

    def check_budget(self, plan: StepPlan) -> None:
        heads = plan.num_decodes + plan.num_verifies
        assert plan.num_new[: plan.num_decodes] == [1] * plan.num_decodes
        drafts = plan.num_draft[plan.num_decodes : heads]
        assert [n - 1 for n in plan.num_new[plan.num_decodes : heads]] == drafts
        assert all(drafts)
        assert not any(plan.num_draft[: plan.num_decodes] + plan.num_draft[heads:])
        assert heads + sum(drafts) <= self.limits.max_samples or not drafts
        limit = self.limits.chunk_tokens + heads + sum(drafts) if heads else self.limits.step_tokens
        assert plan.num_tokens <= limit, f"{plan.num_tokens} tokens, {heads} rows that go on"
        assert len(plan.rows) == len(set(plan.rows)) <= self.limits.max_rows


calls = st.lists(
    st.one_of(
        # family, branch point, prompt tokens, most tokens, cached?, salt
        st.tuples(
            st.just("ask"),
            st.integers(0, 2),
            st.integers(0, 120),
            st.integers(1, 120),
            st.integers(1, 70),
            st.sampled_from([True, True, False]),
            st.just(""),
        ),
        st.tuples(st.just("again"), st.integers(0, 30), st.integers(1, 30)),
        st.tuples(st.just("draft"), st.integers(0, 12), st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.just("stop_drafting"), st.integers(0, 12)),
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("hold"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("fail")),
        st.tuples(st.just("break_row"), st.integers(0, 3)),
        st.tuples(st.just("reserve"), st.integers(0, 30), st.integers(1, 14)),
        st.tuples(st.just("arrive"), st.integers(0, 3), st.sampled_from([True, True, False])),
    ),
    max_size=40,
)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(calls=calls, blocks=st.integers(8, 60), depth=st.integers(0, 1), samples=st.sampled_from([5, 12, 64]))
@settings(max_examples=40, deadline=None)
def test_drafts_change_no_answer_under_random_traffic(
    topology: str,
    calls: list[tuple],  # type: ignore[type-arg]
    blocks: int,
    depth: int,
    samples: int,
) -> None:
    groups, recurrent = TOPOLOGIES[topology]
    num_blocks = tuple(max(8, blocks - 9 * group) for group in range(len(groups)))
    world = Drafted(
        limits(
            groups=groups,
            num_blocks=num_blocks,
            prompt_cache=True,
            max_samples=samples,
            num_checkpoints=6 if recurrent else None,
            checkpoint_interval_tokens=48,
        ),
        depth,
    )
    world.groups, world.recurrent = groups, recurrent
    world.runner = FakeRunner(groups, num_blocks, answer_length=Drafted.length_of, recurrent=recurrent)
    for name, *arguments in calls:
        getattr(world, name)(*arguments)
    while world.scheduler.reservations():
        world.arrive(0, True)
    world.drain()
    world.require_answers(recurrent=recurrent)


def test_scheduler_is_not_told_to_end_drafting_while_drafts_are_verified() -> None:
    """How far the row has come is known at the commit: a step planned before would feed the wrong place."""
    scheduler = Scheduler(limits())
    runner = FakeRunner((FULL,), scheduler.limits.num_blocks)
    scheduler.add(request("a", 10, 20))
    for drafts in ((), (1, 2)):
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(runner.launch(plan).result())
        scheduler.draft(RequestId("a"), drafts)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.num_draft == [2]
    with pytest.raises(AssertionError, match="not known yet"):
        scheduler.draft(RequestId("a"), None)
    scheduler.commit(runner.launch(plan).result())
    scheduler.draft(RequestId("a"), None)
