"""The engine's thread over a fake runner: one request's trouble stays its own, and what ends gives its blocks back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests.portable.test_scheduler import FULL, limits
from troth.contracts.events import Completed, Event, Failed, Segment
from troth.contracts.names import RequestId
from troth.contracts.plan import StepPlan
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.errors import DeviceError, DeviceLost, StreamProtocol
from troth.run import worker
from troth.run.engine import EngineLoop
from troth.run.stream import EventChannel, RequestStream
from troth.run.worker import EngineThread
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.testing.fake_engine import FakeEngine
from troth.testing.fake_runner import FakeRunner

VOCAB = ByteTokenizer.vocab_size


def request(name: str, max_tokens: int | None = 4, **changes: Any) -> Request:
    values: dict[str, Any] = {"prompt_ids": (1, 2, 3), "max_tokens": max_tokens}
    return Request(request_id=RequestId(name), **values | changes)


@contextmanager
def engine_thread(
    runner: FakeRunner | None = None, *, idle_work: Iterable[None] = (), **changes: Any
) -> Iterator[EngineThread]:
    bounds = limits(num_blocks=(400,), context_tokens=4096)
    runner = runner or FakeRunner((FULL,), (400,), vocab_size=VOCAB)
    loop = EngineLoop(Scheduler(bounds), runner, ByteTokenizer(), clock=time.monotonic, **changes)
    thread = EngineThread(loop, FakeEngine().info, clock=time.monotonic, idle_work=idle_work)
    try:
        yield thread
    finally:
        thread.close()


def last(stream: RequestStream) -> Event:
    return list(stream)[-1]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_ids": (5, VOCAB)}, "prompt"),
        ({"prompt_ids": (-1, 5)}, "prompt"),
        ({"sampling": SamplingParams(logit_bias=((VOCAB, 1.0),))}, "logit_bias"),
    ],
)
def test_thread_refuses_tokens_outside_the_vocabulary(changes: dict[str, Any], param: str) -> None:
    """They would index past the model's tables, and fail every row of the step."""
    with engine_thread() as thread:
        refused = last(thread.submit(request("bad", **changes)))
        assert isinstance(refused, Failed)
        assert (refused.kind, refused.param) == ("RequestError", param)
        assert isinstance(last(thread.submit(request("good"))), Completed)


def test_thread_does_idle_work_piece_by_piece_and_requests_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REST_S", 0.0)
    first_is_done, may_go_on = threading.Event(), threading.Event()
    runner = FakeRunner((FULL,), (400,), vocab_size=VOCAB)
    steps_at = list[int]()

    def pieces() -> Iterator[None]:
        steps_at.append(runner.num_steps)
        first_is_done.set()
        may_go_on.wait(10)
        yield
        steps_at.append(runner.num_steps)
        yield

    with engine_thread(runner, idle_work=pieces()) as thread:
        assert first_is_done.wait(10)
        stream = thread.submit(request("asked"))
        assert thread.has_idle_work
        may_go_on.set()
        assert isinstance(last(stream), Completed)
        deadline = time.monotonic() + 10
        while thread.has_idle_work and time.monotonic() < deadline:
            time.sleep(0.01)
        assert steps_at == [0, 4], "the request had four tokens to be computed first"


def test_thread_begins_no_idle_work_right_after_its_start_or_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "REST_S", 60.0)
    begun = list[str]()

    def pieces() -> Iterator[None]:
        begun.append("too early")
        yield

    with engine_thread(idle_work=pieces()) as thread:
        for name in ("first", "second"):
            assert isinstance(last(thread.submit(request(name))), Completed)
        assert thread.status_now().num_steps > 0
        assert not begun
        assert thread.has_idle_work
    assert not thread.has_idle_work, "it may hold the weights"


def test_thread_goes_on_when_idle_work_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(worker, "REST_S", 0.0)

    def pieces() -> Iterator[None]:
        raise RuntimeError("a kernel that does not compile")
        yield

    with engine_thread(idle_work=pieces()) as thread:
        deadline = time.monotonic() + 10
        while thread.has_idle_work and time.monotonic() < deadline:
            time.sleep(0.01)
        assert isinstance(last(thread.submit(request("asked"))), Completed)
        assert any("work of an idle engine failed" in text for text in thread.status_now().downgrades)
    assert "a kernel that does not compile" in caplog.text


def test_thread_fails_only_the_request_whose_arrival_hits_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine died of it, and the request's consumer waited for ever."""
    add = EngineLoop.add

    def buggy(self: EngineLoop, request: Request, *arguments: Any) -> None:
        if request.request_id == "bad":
            raise TypeError("a bug")
        add(self, request, *arguments)

    monkeypatch.setattr(EngineLoop, "add", buggy)
    with engine_thread() as thread:
        running = thread.submit(request("running", 2000))
        refused = last(thread.submit(request("bad")))
        assert isinstance(refused, Failed)
        assert refused.kind == "DeviceError"
        assert "a bug" in refused.message
        assert isinstance(last(running), Completed)
        assert thread.status_now().blocks_used == (0,)


def test_thread_that_fails_ends_every_request_and_says_so() -> None:
    class Buggy(FakeRunner):
        def launch(self, plan: StepPlan) -> Any:
            raise ZeroDivisionError("a bug")

    with engine_thread(Buggy((FULL,), (64,))) as thread:
        streams = [thread.submit(request(name)) for name in "abc"]
        for stream in streams:
            end = last(stream)
            assert isinstance(end, Failed)
            assert "a bug" in end.message
        status = thread.status_now()
        assert (status.state, status.blocks_used, status.num_running, status.num_waiting) == ("failed", (0,), 0, 0)


def test_thread_step_that_fails_on_the_device_ends_its_rows_alone() -> None:
    with engine_thread(FakeRunner((FULL,), (64,), vocab_size=VOCAB, fail_step=1)) as thread:
        end = last(thread.submit(request("a")))
        assert isinstance(end, Failed)
        assert (end.kind, thread.status_now().blocks_used) == ("DeviceError", (0,))
        assert isinstance(last(thread.submit(request("b"))), Completed)


def test_thread_whose_device_is_lost_ends_every_request_and_says_so() -> None:
    class Lost(FakeRunner):
        def launch(self, plan: StepPlan) -> Any:
            raise DeviceLost("the device answers no more")

    with engine_thread(Lost((FULL,), (64,))) as thread:
        ends = [last(thread.submit(request(name))) for name in "ab"]
        assert [end.kind for end in ends if isinstance(end, Failed)] == ["DeviceLost"] * 2
        assert thread.status_now().state == "failed"


def test_thread_close_ends_running_and_waiting_requests_and_frees_their_blocks() -> None:
    with engine_thread() as thread:
        streams = [thread.submit(request(str(index), 4000)) for index in range(8)]
        for stream in streams[:4]:
            next(stream)
        thread.close()
        for stream in streams:
            end = last(stream)
            assert isinstance(end, Failed)
            assert (end.kind, end.reason) == ("Cancelled", "engine_closed")
        status = thread.status_now()
        assert (status.state, status.blocks_used, status.num_running, status.num_waiting) == ("closed", (0,), 0, 0)
        late = last(thread.submit(request("late")))
        assert isinstance(late, Failed)
        assert late.reason == "engine_closed"


def test_thread_cancels_a_held_consumer_that_stays_idle() -> None:
    with engine_thread(consumer_idle_s=0.05) as thread:
        stream = thread.submit(request("idle", 4000))
        deadline = time.monotonic() + 30
        while thread.status_now().num_running or not thread.status_now().num_requests_by_end:
            assert time.monotonic() < deadline, "it was never cancelled"
            time.sleep(0.01)
        assert thread.status_now().blocks_used == (0,)
        end = last(stream)
        assert isinstance(end, Failed)
        assert (end.kind, end.reason) == ("Cancelled", "consumer_idle")


def test_stream_refuses_a_second_async_consumer() -> None:
    """The first one was forgotten and waited for ever."""
    channel = EventChannel(time.monotonic)

    async def scenario() -> None:
        first = asyncio.ensure_future(channel.take_async())
        await asyncio.sleep(0)
        with pytest.raises(StreamProtocol):
            await channel.take_async()
        channel.offer(Failed(kind="DeviceError", message="m"))
        taken = await first
        assert taken is not None
        assert isinstance(taken[0], Failed)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_stream_read_whole_always_has_room_and_wakes_nobody_before_the_end() -> None:
    channel = EventChannel(time.monotonic, whole=True)
    taken: list[Any] = []
    reader = threading.Thread(target=lambda: taken.append(channel.take()), daemon=True)
    reader.start()
    assert all(channel.offer(Segment(text="x", num_completion_tokens=i)) for i in range(1, 2000))
    reader.join(0.05)
    assert reader.is_alive()
    channel.offer(Failed(kind="DeviceError", message="m"))
    reader.join(30)
    (first,) = taken
    assert first[0].num_completion_tokens == 1


def test_stream_end_reaches_every_thread_that_waits() -> None:
    channel = EventChannel(time.monotonic)
    taken: list[Any] = []
    threads = [threading.Thread(target=lambda: taken.append(channel.take()), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    channel.offer(Failed(kind="DeviceError", message="m"))
    for thread in threads:
        thread.join(30)
    assert len(taken) == 3
    assert taken.count(None) == 2


def test_stream_whose_event_loop_was_closed_takes_events_all_the_same() -> None:
    """Waking a closed loop raises, and did so in the engine's thread."""
    channel = EventChannel(time.monotonic)

    async def leave() -> None:
        waiting = asyncio.ensure_future(channel.take_async())
        await asyncio.sleep(0)
        # The waiter is put back, as it is while the engine is about to wake a loop that closes meanwhile.
        waiter = channel._waiter
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        channel._waiter = waiter

    asyncio.run(leave())
    assert channel.offer(Failed(kind="DeviceError", message="m"))
    assert channel.take() is not None


def test_thread_survives_streams_collected_while_it_waits() -> None:
    """The lock it was woken through was not reentrant: the engine and everyone who asked it hung for ever.

    The profile hook stands for a garbage collection, which may come at any call.
    """
    doomed: list[RequestStream] = []
    is_hooked = threading.Event()

    def collect(frame: FrameType, event: str, argument: object) -> None:
        is_hooked.set()
        if event == "call" and frame.f_code.co_filename == threading.__file__ and doomed:
            doomed.pop()

    threading.setprofile(collect)
    try:
        with engine_thread() as thread:
            assert is_hooked.wait(30)
            for index in range(20):
                stream = thread.submit(request(str(index), 4000))
                while not thread.status_now().num_running:
                    time.sleep(0.001)
                doomed.append(stream)
                del stream
            doomed.clear()
            assert isinstance(last(thread.submit(request("good"))), Completed)
            assert thread.status_now(30).num_requests_by_end == {"Cancelled": 20, "length": 1}
    finally:
        threading.setprofile(None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_thread_and_streams_refuse_to_work_in_a_fork() -> None:
    """The child waited for ever: the engine's thread is the parent's alone."""
    with engine_thread() as thread:
        stream = thread.submit(request("parent", 4000))
        next(stream)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            told = 0
            try:
                refused = last(thread.submit(request("child")))
                told += isinstance(refused, Failed) and "is a fork" in refused.message
                for ask in (lambda: next(stream), thread.status_now):
                    try:
                        ask()
                    except DeviceError as error:
                        told += "is a fork" in str(error)
                stream.cancel()
                thread.close()
            finally:
                os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert thread.status_now().num_running == 1
        stream.cancel()
        assert isinstance(last(stream), Completed)


def test_thread_whose_scheduler_fails_ends_every_request_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving the blocks back hit the bug again, and the consumers behind it waited for ever."""

    def buggy(*arguments: Any, **named: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Scheduler, "finish", buggy)
    with engine_thread() as thread:
        streams = [thread.submit(request(str(index), 4000)) for index in range(4)]
        next(streams[0])
        streams[1].cancel()
        ends = [last(stream) for stream in streams]
        assert {type(end) for end in ends} == {Failed}
        assert all("a bug" in end.message for end in ends if isinstance(end, Failed))
