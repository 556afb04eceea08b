"""Laws of the scheduler under random traffic: hypothesis plays clients, consumers and failing steps."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.portable.test_scheduler import FULL, WINDOW, limits, request
from troth.contracts.names import RequestId
from troth.contracts.plan import StepPlan, StepResult
from troth.contracts.request import Request
from troth.errors import Busy, ContextExceeded
from troth.schedule import invariants
from troth.schedule.admission import SchedulerLimits
from troth.schedule.replay import RecordingScheduler, replay
from troth.testing.fake_runner import FakeRunner, expected_answer

GROUPS = (FULL, WINDOW)

traffic = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 120), st.integers(1, 60), st.integers(0, 2)),
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("hold"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("fail")),
    ),
    max_size=40,
)


class Traffic:
    """Applies random calls; knows which requests must end with their full answer."""

    def __init__(self, limits: SchedulerLimits, depth: int) -> None:
        self.lines: list[str] = []
        self.scheduler = RecordingScheduler(limits, self.lines.append)
        self.runner = FakeRunner(limits.groups, limits.num_blocks, answer_length=self.length_of)
        self.limits = limits
        self.depth = depth
        self.flights: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.cancelled: set[str] = set()

    @staticmethod
    def length_of(request: Request) -> int | None:
        return 1 + len(request.prompt_ids) % 23

    def add(self, num_prompt: int, max_tokens: int, priority: int) -> None:
        name = f"r{len(self.requests)}"
        one = request(name, num_prompt, max_tokens, priority=priority, eos_ids=frozenset({999}))
        self.requests[name] = one
        try:
            self.scheduler.add(one)
        except (Busy, ContextExceeded):
            self.ends[name] = "refused"

    def cancel(self, number: int) -> None:
        if self.scheduler.finish(RequestId(f"r{number}")):
            self.cancelled.add(f"r{number}")

    def hold(self, number: int, held: bool) -> None:
        self.scheduler.hold(RequestId(f"r{number}"), held)

    def steps(self, count: int) -> None:
        for _ in range(count):
            if not self.step():
                return

    def step(self) -> bool:
        plan = self.scheduler.plan(0.0)
        invariants.check(self.scheduler)
        if plan is not None:
            self.check_budget(plan)
            self.flights.append((plan, self.runner.launch(plan).result()))
        if not self.flights or (plan is not None and len(self.flights) <= self.depth):
            return plan is not None
        for outcome in self.scheduler.commit(self.flights.popleft()[1]):
            assert outcome.request_id not in self.ends, "an ended request got an outcome"
            assert outcome.request_id not in self.cancelled, "a cancelled request got an outcome"
            self.answers.setdefault(outcome.request_id, []).extend(outcome.token_ids)
            if outcome.finish:
                self.ends[outcome.request_id] = outcome.finish
            if outcome.failure:
                self.ends[outcome.request_id] = "failed"
        invariants.check(self.scheduler)
        return True

    def fail(self) -> None:
        if self.flights:
            self.flights.popleft()
            for outcome in self.scheduler.fail_step("told to"):
                self.ends[outcome.request_id] = "failed"
            invariants.check(self.scheduler)

    def check_budget(self, plan: StepPlan) -> None:
        decodes = plan.num_decodes
        assert plan.num_new[:decodes] == [1] * decodes
        limit = self.limits.chunk_tokens + decodes if decodes else self.limits.step_tokens
        assert plan.num_tokens <= limit, f"{plan.num_tokens} tokens, {decodes} decodes"
        assert len(plan.rows) == len(set(plan.rows)) <= self.limits.max_rows

    def drain(self) -> None:
        """Let everyone end: first those whose consumers read, past all that are held; then the held ones too."""
        self.run_dry()
        unread = {state.request_id for state in self.scheduler.states() if state.held}
        starved = self.requests.keys() - self.ends.keys() - self.cancelled - unread
        assert not starved, f"{starved} wait behind {unread}, which nobody reads"
        for number in range(len(self.requests)):
            self.hold(number, False)
        self.run_dry()

    def require_answers(self, *, recurrent: bool = False) -> None:
        """Every request has ended, those that were answered with their whole answer; nothing is left, and the trace of
        it replays.
        """
        for name, one in self.requests.items():
            assert name in self.ends or name in self.cancelled, f"{name} never ended"
            if self.ends.get(name) in ("stop", "length"):
                assert one.max_tokens is not None
                assert self.answers[name] == expected_answer(
                    one,
                    one.max_tokens,
                    groups=self.limits.groups,
                    answer_length=self.length_of,
                    recurrent=recurrent,
                )
        assert self.scheduler.is_idle
        assert [pool.num_used for pool in self.scheduler.pools] == [0] * len(self.limits.groups)
        invariants.check(self.scheduler)
        assert replay(self.lines) == len(self.lines) - 1

    def run_dry(self) -> None:
        for _ in range(20_000):
            if not self.step():
                return
        raise AssertionError("the scheduler goes on without end")


@given(calls=traffic, blocks=st.integers(6, 40), depth=st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_scheduler_keeps_its_laws_under_random_traffic(calls: list[tuple], blocks: int, depth: int) -> None:  # type: ignore[type-arg]
    world = Traffic(limits(groups=GROUPS, num_blocks=(blocks, max(8, blocks))), depth)
    for name, *arguments in calls:
        getattr(world, name)(*arguments)
    world.drain()
    world.require_answers()


@given(
    unread=st.lists(st.tuples(st.integers(1, 90), st.integers(2, 40), st.integers(0, 2)), min_size=1, max_size=6),
    others=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=4),
    blocks=st.integers(9, 24),
    before=st.integers(1, 12),
    depth=st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_scheduler_lets_nobody_wait_for_a_consumer_that_does_not_read(
    unread: list[tuple[int, int, int]], others: list[tuple[int, int, int]], blocks: int, before: int, depth: int
) -> None:
    world = Traffic(limits(groups=GROUPS, num_blocks=(blocks, blocks)), depth)
    for one in unread:
        world.add(*one)
    world.steps(before)
    for number in range(len(unread)):
        world.hold(number, True)
    for one in others:
        world.add(*one)
    world.drain()
    world.require_answers()
