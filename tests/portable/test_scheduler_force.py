"""Tokens that nobody sampled: fed like any other, on top of the limit, at any depth and through preemption."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.portable.test_scheduler import FULL, WINDOW, Loop, limits, request
from troth.contracts.answer import AnswerReading
from troth.contracts.events import Completed, Event, Failed, Segment
from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.errors import ContextExceeded
from troth.run.engine import EngineLoop
from troth.schedule.admission import admit
from troth.schedule.replay import RecordingScheduler, replay
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.testing.fake_runner import FakeRunner, _next_token, _state_after

GROUPS = (FULL, WINDOW)
CLOSE = (901, 902, 903)
READING = AnswerReading(reasoning="think", reasoning_budget=5, close_ids=CLOSE)


def expected(one: Request, forced_after: int, forced: tuple[int, ...], *, recurrent: bool = False) -> list[int]:
    """The answer of a row that is given ``forced`` behind its first ``forced_after`` tokens."""
    assert one.max_tokens is not None
    tokens = list(one.prompt_ids)
    num_prompt = len(tokens)
    while len(tokens) - num_prompt < one.max_tokens + len(forced):
        if len(tokens) - num_prompt == forced_after:
            tokens += forced
            continue
        seen = [tokens[max(0, len(tokens) - (spec.window or len(tokens))) :] for spec in GROUPS]
        if recurrent:
            seen.append([_state_after(tokens)])
        tokens.append(_next_token(one, seen, len(tokens) - num_prompt, 1000, None))
    return tokens[num_prompt:]


def answers(requests: list[Request], forced_after: int, depth: int, **bounds: Any) -> Loop:
    """Run requests; each gets CLOSE as soon as it has emitted so many tokens."""
    loop = Loop(limits(groups=GROUPS, **bounds), depth)
    for one in requests:
        loop.scheduler.add(one)
    waiting = {one.request_id for one in requests}
    if forced_after == 0:
        for one in requests:
            loop.scheduler.force(one.request_id, CLOSE)
        loop.answers |= {one.request_id: list(CLOSE) for one in requests}
        waiting.clear()
    for _ in range(2000):
        if not loop.step():
            return loop
        for request_id in [name for name in waiting if len(loop.answers.get(name, [])) == forced_after]:
            loop.scheduler.force(request_id, CLOSE)
            loop.answers[request_id] += CLOSE
            waiting.remove(request_id)
    raise AssertionError("it never came to rest")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("forced_after", [0, 1, 5])
def test_forced_tokens_are_part_of_the_answer_at_any_depth(depth: int, forced_after: int) -> None:
    requests = [request(f"r{i}", 5 + 17 * i, 20, reading=READING) for i in range(4)]
    loop = answers(requests, forced_after, depth, num_blocks=(64, 64))
    for one in requests:
        assert loop.answers[one.request_id] == expected(one, forced_after, CLOSE), one.request_id
    assert set(loop.ends.values()) == {"length"}
    assert loop.scheduler.is_idle


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_forced_tokens_survive_preemption(depth: int) -> None:
    requests = [request(f"r{i}", 40, 60, reading=READING) for i in range(4)]
    loop = answers(requests, 30, depth, num_blocks=(13, 13))
    assert loop.scheduler.num_preemptions > 0
    for one in requests:
        assert loop.answers[one.request_id] == expected(one, 30, CLOSE)


def test_admission_keeps_room_for_what_may_be_forced() -> None:
    scheduler = Scheduler(limits(context_tokens=32))
    assert scheduler.add(request("a", 16, None, reading=READING)) == 32 - 16 - len(CLOSE)
    scheduler.add(request("b", 16, 13, reading=READING))
    with pytest.raises(ContextExceeded):
        scheduler.add(request("c", 16, 14, reading=READING))


def test_forced_tokens_are_in_the_trace() -> None:
    lines: list[str] = []
    scheduler = RecordingScheduler(limits(), lines.append)
    runner = FakeRunner((FULL,), (64,))
    one = request("a", 20, 8, reading=READING)
    scheduler.add(one)
    for step in range(30):
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        scheduler.commit(runner.launch(plan).result())
        if step == 3:
            scheduler.force(one.request_id, CLOSE)
    assert any(line.startswith('["force"') for line in lines)
    assert replay(lines) == len(lines) - 1


class Sink:
    """Takes every event."""

    last_read = 0.0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def offer(self, event: Event) -> bool:
        self.events.append(event)
        return True


class Babbler(FakeRunner):
    """Opens a thought, then says ``a`` for ever."""

    def launch(self, plan: Any) -> Any:
        step = super().launch(plan)
        for i, sample in enumerate(plan.sample_steps):
            if step.answer.token_ids[i]:
                said = b"<think>"[sample] if sample < 7 else ord("a")
                step.answer.token_ids[i] = [said]
                self._last_token[plan.rows[i]] = said
        return step


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at_once", [False, True])
def test_engine_closes_reasoning_when_its_budget_is_used_up(depth: int, at_once: bool) -> None:
    close = tuple(b"</think>")
    reading = AnswerReading(
        reasoning="think",
        reasoning_budget=0 if at_once else 3,
        close_ids=close,
        prompt_tail="<think>" if at_once else "",
    )
    one = Request(request_id=RequestId("r"), prompt_ids=(1, 2, 3), max_tokens=20, reading=reading)
    runner = Babbler((FULL,), (64,), vocab_size=257)
    loop = EngineLoop(Scheduler(limits()), runner, ByteTokenizer(), clock=time.monotonic, pipeline_depth=depth)
    sink = Sink()
    loop.add(one, sink)
    while loop.step():
        pass
    end = sink.events[-1]
    assert isinstance(end, Completed), end
    said = {
        kind: "".join(event.text for event in sink.events if isinstance(event, Segment) and event.kind == kind)
        for kind in ("text", "reasoning")
    }
    assert end.usage.num_completion_tokens == 20 + len(close)
    assert end.finish_reason == "length"
    assert end.usage.num_reasoning_tokens == len(said["reasoning"]) == (0 if at_once else 3)
    assert said["text"] == "a" * 20 if at_once else said["text"] == "a" * 10
    assert not end.unclosed_reasoning


@pytest.mark.parametrize("depth", [0, 1])
def test_engine_ends_the_reasoning_of_one_row_when_asked_and_leaves_the_others(depth: int) -> None:
    close = tuple(b"</think>")
    reading = AnswerReading(reasoning="think", close_ids=close)
    asked, other, cramped = (
        Request(request_id=RequestId(name), prompt_ids=(1, 2, 3), max_tokens=limit, reading=reading)
        for name, limit in (("asked", 30), ("other", 30), ("cramped", limits().largest_request - 4))
    )
    runner = Babbler((FULL,), (64,), vocab_size=257)
    loop = EngineLoop(Scheduler(limits()), runner, ByteTokenizer(), clock=time.monotonic, pipeline_depth=depth)
    sinks = {one.request_id: Sink() for one in (asked, other, cramped)}
    for one in (asked, other, cramped):
        loop.add(one, sinks[one.request_id])
    for _ in range(15):
        loop.step()
    loop.end_reasoning(asked.request_id)
    loop.end_reasoning(cramped.request_id)  # its own limit fills the context: the mark has no room
    loop.end_reasoning(RequestId("nobody"))
    while not isinstance(sinks[asked.request_id].events[-1], Completed):
        loop.step()
    for _ in range(10):
        loop.step()

    def told(one: Request, kind: str) -> str:
        events = sinks[one.request_id].events
        return "".join(event.text for event in events if isinstance(event, Segment) and event.kind == kind)

    end = sinks[asked.request_id].events[-1]
    assert isinstance(end, Completed)
    assert end.usage.num_completion_tokens == 30 + len(close)
    assert 0 < end.usage.num_reasoning_tokens == len(told(asked, "reasoning")) < 15
    assert told(asked, "text") == "a" * (30 - 7 - end.usage.num_reasoning_tokens)
    assert len(told(other, "reasoning")) == 30 - 7
    assert told(other, "text") == told(cramped, "text") == ""
    assert len(told(cramped, "reasoning")) > 20


@pytest.mark.parametrize("num_over", [0, 1])
def test_engine_closes_reasoning_only_where_the_context_has_room_for_the_mark(num_over: int) -> None:
    """A prompt that leaves room for a token and not for the mark got both, and its row outgrew the context."""
    limit, close = limits().largest_request, tuple(b"</think>")
    prompt = (1,) * (limit - 1 - len(close) + num_over)
    reading = AnswerReading(reasoning="think", close_ids=close, prompt_tail="<think>")
    loop = EngineLoop(
        Scheduler(limits()), Babbler((FULL,), (64,), vocab_size=257), ByteTokenizer(), clock=time.monotonic
    )
    sink = Sink()
    loop.add(Request(request_id=RequestId("r"), prompt_ids=prompt, reading=reading), sink)
    loop.end_reasoning(RequestId("r"))
    while not isinstance(sink.events[-1], Completed):
        loop.step()
    assert sink.events[-1].usage.num_completion_tokens == (1 if num_over else 1 + len(close))


def test_answer_without_a_limit_leaves_room_for_the_mark_that_ends_reasoning() -> None:
    free, bound = (
        Request(request_id=RequestId("r"), prompt_ids=(1, 2, 3), reading=AnswerReading(close_ids=ids))
        for ids in ((), CLOSE)
    )
    assert admit(free, limits()) - admit(bound, limits()) == len(CLOSE)


def test_engine_refuses_a_reading_it_does_not_know() -> None:
    one = Request(request_id=RequestId("r"), prompt_ids=(1,), reading=AnswerReading(tools="morse"))
    loop = EngineLoop(
        Scheduler(limits()), FakeRunner((FULL,), (64,)), ByteTokenizer(), clock=time.monotonic, pipeline_depth=0
    )
    sink = Sink()
    loop.add(one, sink)
    assert isinstance(sink.events[-1], Failed)
    assert "morse" in sink.events[-1].message
