"""A recorded trace replays to the same plans, and a changed one is noticed."""

from __future__ import annotations

import json

import pytest

from tests.portable.test_scheduler import limits, request
from troth.errors import RequestError
from troth.schedule.replay import RecordingScheduler, replay
from troth.testing.fake_runner import FakeRunner


def record() -> list[str]:
    lines: list[str] = []
    scheduler = RecordingScheduler(limits(), lines.append)
    runner = FakeRunner(limits().groups, limits().num_blocks)
    scheduler.add(request("a", 40, 3))
    with pytest.raises(RequestError):
        scheduler.add(request("a", 40, 3))
    scheduler.add(request("b", 4, 9))
    scheduler.hold(request("b", 4).request_id, False)
    for _ in range(4):
        plan = scheduler.plan(1.5)
        assert plan is not None
        scheduler.commit(runner.launch(plan).result())
    scheduler.plan(2.0)
    scheduler.fail_step("gone")
    scheduler.finish(request("b", 4).request_id)
    assert scheduler.plan(3.0) is None
    return lines


def test_replay_reproduces_a_recorded_trace() -> None:
    lines = record()
    assert replay(lines) == len(lines) - 1


def test_replay_names_the_first_call_that_differs() -> None:
    lines = record()
    number = next(i for i, line in enumerate(lines) if json.loads(line)[0] == "plan")
    call, argument, answer = json.loads(lines[number])
    answer["rows"] = [3]
    lines[number] = json.dumps([call, argument, answer])
    with pytest.raises(ValueError, match=rf"call {number} \(plan\)"):
        replay(lines)


def test_replay_refuses_a_trace_without_limits() -> None:
    with pytest.raises(ValueError, match="starts with its limits"):
        replay(record()[1:])
    with pytest.raises(ValueError, match="starts with its limits"):
        replay([])
