"""The scheduler's behaviour, seen through a runner that would notice any wrong block."""

from __future__ import annotations

import pytest

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import RequestId
from troth.contracts.plan import NO_SAMPLE, ON_DEVICE, StepResult
from troth.contracts.request import Request
from troth.errors import Busy, ContextExceeded, RequestError
from troth.schedule import invariants
from troth.schedule.admission import SchedulerLimits
from troth.schedule.request_queues import HELD_STEPS
from troth.schedule.scheduler import Scheduler
from troth.testing.fake_runner import FakeRunner, expected_answer

FULL = AttentionSpec(layers=(0,), num_kv_heads=1, head_dim=8, value_dim=8, element_bytes=4)
WINDOW = AttentionSpec(layers=(1,), num_kv_heads=1, head_dim=8, value_dim=8, element_bytes=4, window=20)


def limits(**changes: object) -> SchedulerLimits:
    values: dict[str, object] = {
        "groups": (FULL,),
        "num_blocks": (64,),
        "max_rows": 4,
        "max_waiting": 8,
        "chunk_tokens": 32,
        "step_tokens": 64,
        "context_tokens": 512,
    }
    return SchedulerLimits(**values | changes)  # type: ignore[arg-type]


def request(name: str, num_prompt: int, max_tokens: int | None = 4, **changes: object) -> Request:
    prompt = tuple((hash_of(name) + 7 * i) % 900 for i in range(num_prompt))
    return Request(request_id=RequestId(name), prompt_ids=prompt, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]


def hash_of(name: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 900


class Loop:
    """Drives a scheduler and a fake runner, one committed step at a time, checking the laws in between."""

    def __init__(self, limits: SchedulerLimits, depth: int = 0, **runner: object) -> None:
        self.scheduler = Scheduler(limits)
        self.runner = FakeRunner(limits.groups, limits.num_blocks, **runner)  # type: ignore[arg-type]
        self.depth = depth
        self.pending: list[object] = []
        self.answers: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.plans: list[object] = []

    def step(self) -> bool:
        plan = self.scheduler.plan(0.0)
        invariants.check(self.scheduler)
        if plan is not None:
            self.plans.append(plan)
            self.pending.append(self.runner.launch(plan))
        commits = bool(self.pending) and (plan is None or len(self.pending) > self.depth)
        if commits:
            for outcome in self.scheduler.commit(self.pending.pop(0).result()):  # type: ignore[attr-defined]
                self.answers.setdefault(outcome.request_id, []).extend(outcome.token_ids)
                if outcome.finish:
                    self.ends[outcome.request_id] = outcome.finish
                if outcome.failure:
                    self.ends[outcome.request_id] = "failed"
            invariants.check(self.scheduler)
        return plan is not None or commits

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError(f"not idle after {most} steps")


def test_scheduler_gives_the_right_answer_for_one_request() -> None:
    loop = Loop(limits())
    one = request("a", 100, 10)
    assert loop.scheduler.add(one) == 10
    loop.run()
    assert loop.answers["a"] == expected_answer(one, 10, groups=(FULL,))
    assert loop.ends == {"a": "length"}
    assert loop.scheduler.is_idle
    assert loop.scheduler.pools[0].num_used == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_scheduler_answers_are_the_same_alone_and_in_a_batch(depth: int) -> None:
    groups = (FULL, WINDOW)
    loop = Loop(limits(groups=groups, num_blocks=(64, 40)), depth)
    requests = [request(f"r{i}", 5 + 17 * i, 3 + 5 * i) for i in range(7)]
    for one in requests:
        loop.scheduler.add(one)
    loop.run()
    for one in requests:
        assert one.max_tokens is not None
        assert loop.answers[one.request_id] == expected_answer(one, one.max_tokens, groups=groups)


@pytest.mark.parametrize("depth", [0, 1])
def test_scheduler_preempts_the_youngest_and_resumes_it_exactly(depth: int) -> None:
    loop = Loop(limits(num_blocks=(13,)), depth)
    requests = [request(f"r{i}", 40, 60) for i in range(4)]
    for one in requests:
        loop.scheduler.add(one)
    loop.run()
    assert loop.scheduler.num_preemptions > 0
    for one in requests:
        assert loop.answers[one.request_id] == expected_answer(one, 60, groups=(FULL,))
    assert loop.scheduler.pools[0].num_used == 0


def test_scheduler_ends_a_request_at_its_eos_and_emits_it() -> None:
    one = request("a", 20, 50, eos_ids=frozenset({950}))
    loop = Loop(limits(), answer_length=lambda r: 7)
    loop.scheduler.add(one)
    loop.run()
    assert len(loop.answers["a"]) == 7
    assert loop.answers["a"][-1] == 950
    assert loop.ends == {"a": "stop"}


def test_scheduler_discards_the_step_planned_past_an_eos() -> None:
    """With two steps in flight the end is seen late; the extra token must reach nobody."""
    one = request("a", 20, 50, eos_ids=frozenset({950}))
    loop = Loop(limits(), depth=1, answer_length=lambda r: 3)
    loop.scheduler.add(one)
    loop.run()
    assert loop.answers["a"] == expected_answer(one, 50, groups=(FULL,), answer_length=lambda r: 3)
    assert loop.runner.num_tokens == 20 + 3


def test_scheduler_plans_decodes_first_and_one_chunk_beside_them() -> None:
    loop = Loop(limits())
    loop.scheduler.add(request("decoding", 3, 40))
    loop.step()
    loop.scheduler.add(request("long", 200, 2))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    assert plan.request_ids == ["decoding", "long"]
    assert plan.num_new == [1, 32]
    assert plan.sample_steps == [1, NO_SAMPLE]


def test_scheduler_lets_a_lone_prompt_take_the_whole_budget() -> None:
    loop = Loop(limits())
    loop.scheduler.add(request("long", 200, 2))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    assert plan.num_new == [64]


def test_scheduler_shares_the_budget_among_prompts_in_chunks() -> None:
    loop = Loop(limits())
    loop.scheduler.add(request("a", 200, 2))
    loop.scheduler.add(request("b", 200, 2))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    assert plan.num_new == [32, 32]


def test_scheduler_feeds_the_token_in_flight_by_reference() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request("a", 3, 5))
    first = scheduler.plan(0.0)
    second = scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    assert second.token_ids == [ON_DEVICE]
    assert second.starts == [3]
    assert second.sample_steps == [1]


def test_scheduler_plans_nothing_past_max_tokens_while_a_step_is_in_flight() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request("a", 3, 1))
    assert scheduler.plan(0.0) is not None
    assert scheduler.plan(0.0) is None


def test_scheduler_runs_lower_priority_numbers_first() -> None:
    loop = Loop(limits(max_rows=1))
    loop.scheduler.add(request("later", 10, 2, priority=5))
    loop.scheduler.add(request("sooner", 10, 2, priority=0))
    plan = loop.scheduler.plan(0.0)
    assert plan is not None
    assert plan.request_ids == ["sooner"]


def test_scheduler_refuses_with_busy_when_the_queue_is_full() -> None:
    scheduler = Scheduler(limits(max_rows=1, max_waiting=1))
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 3))
    with pytest.raises(Busy, match="queue holds 1"):
        scheduler.add(request("c", 3))
    scheduler.plan(0.0)
    with pytest.raises(Busy):
        scheduler.add(request("d", 3))


def test_scheduler_refuses_what_can_never_fit_with_both_numbers() -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(ContextExceeded) as caught:
        scheduler.add(request("a", 500, 13))
    assert (caught.value.num_prompt_tokens, caught.value.max_tokens, caught.value.limit) == (500, 13, 512)
    with pytest.raises(ContextExceeded):
        scheduler.add(request("b", 512, None))
    assert scheduler.add(request("c", 500, None)) == 12


def test_scheduler_limit_follows_a_pool_smaller_than_the_context() -> None:
    scheduler = Scheduler(limits(num_blocks=(4,)))
    assert scheduler.add(request("a", 60, None)) == 4
    with pytest.raises(ContextExceeded):
        scheduler.add(request("b", 60, 5))


def test_scheduler_refuses_a_request_without_tokens() -> None:
    with pytest.raises(RequestError):
        Scheduler(limits()).add(request("a", 0))


@pytest.mark.parametrize(("num_prompt", "max_tokens", "param"), [(500, 13, "max_tokens"), (512, None, "prompt")])
def test_scheduler_names_the_field_that_makes_a_request_too_long(
    num_prompt: int, max_tokens: int | None, param: str
) -> None:
    with pytest.raises(ContextExceeded) as caught:
        Scheduler(limits()).add(request("a", num_prompt, max_tokens))
    assert caught.value.param == param


def test_scheduler_refuses_a_second_request_with_the_same_id() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request("a", 3))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(request("a", 3))


def test_scheduler_finish_returns_all_blocks_at_any_moment() -> None:
    for steps in range(8):
        loop = Loop(limits(), depth=1)
        loop.scheduler.add(request("a", 100, 20))
        for _ in range(steps):
            loop.step()
        assert loop.scheduler.finish(RequestId("a"))
        assert not loop.scheduler.finish(RequestId("a"))
        loop.run()
        assert loop.scheduler.pools[0].num_used == 0
        assert loop.scheduler.is_idle


def test_scheduler_finish_cuts_the_output_at_the_last_token_handed_over() -> None:
    loop = Loop(limits())
    loop.scheduler.add(request("a", 10, 20))
    for _ in range(5):
        loop.step()
    state = loop.scheduler.state_of(RequestId("a"))
    assert state is not None
    assert state.num_output == 5
    loop.scheduler.finish(RequestId("a"), num_emitted=2)
    assert len(state.output_ids) == 2
    assert len(state.committed_ids) == 11  # the token at which its consumer ends is not committed


def test_scheduler_holds_a_request_without_touching_others() -> None:
    loop = Loop(limits())
    held, other = request("held", 10, 20), request("other", 10, 6)
    loop.scheduler.add(held)
    loop.scheduler.add(other)
    loop.step()
    loop.scheduler.hold(RequestId("held"), True)
    loop.run()
    assert len(loop.answers["held"]) == 1
    assert loop.answers["other"] == expected_answer(other, 6, groups=(FULL,))
    loop.scheduler.hold(RequestId("held"), False)
    loop.run()
    assert loop.answers["held"] == expected_answer(held, 20, groups=(FULL,))


def test_scheduler_passes_over_a_held_request_in_the_queue() -> None:
    loop = Loop(limits(max_rows=1))
    loop.scheduler.add(request("held", 10, 2))
    loop.scheduler.add(request("other", 10, 2))
    loop.scheduler.hold(RequestId("held"), True)
    loop.run()
    assert set(loop.ends) == {"other"}


def test_scheduler_held_row_makes_way_at_once_for_a_request_that_waits_for_nothing_else() -> None:
    loop = Loop(limits(max_rows=1))
    held, other = request("held", 10, 20), request("other", 10, 6)
    loop.scheduler.add(held)
    loop.step()
    loop.scheduler.hold(RequestId("held"), True)
    loop.scheduler.add(other)
    loop.run()
    assert loop.answers["other"] == expected_answer(other, 6, groups=(FULL,))
    assert len(loop.answers["held"]) == 1
    loop.scheduler.hold(RequestId("held"), False)
    loop.run()
    assert loop.answers["held"] == expected_answer(held, 20, groups=(FULL,))


def test_scheduler_held_row_makes_way_for_a_request_only_after_a_pause_while_others_run() -> None:
    loop = Loop(limits(max_rows=2))
    held, runs, waits = request("held", 10, 20), request("runs", 10, 3 * HELD_STEPS), request("waits", 10, 2)
    loop.scheduler.add(held)
    loop.scheduler.add(runs)
    loop.step()
    loop.scheduler.hold(RequestId("held"), True)
    loop.scheduler.add(waits)
    for _ in range(HELD_STEPS):
        loop.step()
    assert loop.scheduler.num_preemptions == 0
    for _ in range(3):
        loop.step()
    assert "waits" in loop.ends
    assert "runs" not in loop.ends
    loop.scheduler.hold(RequestId("held"), False)
    loop.run()
    assert loop.answers["held"] == expected_answer(held, 20, groups=(FULL,))
    assert loop.answers["runs"] == expected_answer(runs, 3 * HELD_STEPS, groups=(FULL,))


def test_scheduler_takes_the_blocks_of_a_held_row_before_those_of_a_younger_one() -> None:
    loop = Loop(limits(num_blocks=(6,)))
    held, runs = request("held", 40, 4), request("runs", 40, 30)
    loop.scheduler.add(held)
    loop.scheduler.add(runs)
    loop.step()
    loop.scheduler.hold(RequestId("held"), True)
    loop.run()
    assert loop.answers["runs"] == expected_answer(runs, 30, groups=(FULL,))
    assert loop.scheduler.num_preemptions == 1
    loop.scheduler.hold(RequestId("held"), False)
    loop.run()
    assert loop.answers["held"] == expected_answer(held, 4, groups=(FULL,))


def test_scheduler_fails_only_the_rows_of_a_failed_step() -> None:
    loop = Loop(limits(max_rows=1))
    loop.scheduler.add(request("broken", 10, 5))
    loop.scheduler.add(request("fine", 10, 5))
    loop.scheduler.plan(0.0)
    outcomes = loop.scheduler.fail_step("the device went away")
    assert [(o.request_id, o.failure) for o in outcomes] == [("broken", "the device went away")]
    loop.run()
    assert loop.ends == {"fine": "length"}


def test_scheduler_fails_one_row_of_a_step_that_has_bad_logits() -> None:
    scheduler = Scheduler(limits())
    scheduler.add(request("bad", 10, 5))
    scheduler.add(request("good", 10, 5))
    plan = scheduler.plan(0.0)
    assert plan is not None
    outcomes = scheduler.commit(StepResult(plan.step_id, [[], [1]], failures={0: "logits are not finite"}))
    assert [(o.request_id, o.failure, list(o.token_ids)) for o in outcomes] == [
        ("bad", "logits are not finite", []),
        ("good", None, [1]),
    ]
    assert scheduler.state_of(RequestId("bad")) is None


def test_scheduler_reports_prompt_progress_chunk_by_chunk() -> None:
    loop = Loop(limits())
    loop.scheduler.add(request("a", 150, 2))
    done = []
    for _ in range(3):
        plan = loop.scheduler.plan(0.0)
        assert plan is not None
        done += [o.num_prefilled for o in loop.scheduler.commit(loop.runner.launch(plan).result())]
    assert done == [64, 128, 150]


def test_scheduler_window_group_holds_no_more_than_its_window_needs() -> None:
    groups = (WINDOW,)
    loop = Loop(limits(groups=groups, num_blocks=(WINDOW.blocks_for(10**6, 64),)))
    one = request("a", 300, 100)
    loop.scheduler.add(one)
    loop.run()
    assert loop.answers["a"] == expected_answer(one, 100, groups=groups)


def test_scheduler_works_without_attention_groups() -> None:
    """A purely recurrent model has no blocks at all."""
    scheduler = Scheduler(limits(groups=(), num_blocks=()))
    scheduler.add(request("a", 30, 2))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.block_updates == []


def test_scheduler_limits_refuse_nonsense() -> None:
    for changes in (
        {"max_rows": 0},
        {"max_waiting": -1},
        {"num_blocks": ()},
        {"step_tokens": 8},
        {"chunk_tokens": 0},
    ):
        with pytest.raises(ValueError, match=r"\d"):
            limits(**changes)
