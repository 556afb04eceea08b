"""The queue between an engine handle and its consumer: order, ends, cancellation, one reader."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from troth.contracts.events import Completed, Event, Failed, Queued, Segment, Usage
from troth.contracts.names import RequestId
from troth.errors import StreamProtocol
from troth.runtime.event_queue import EventQueue, TokenCount

DONE = Completed(finish_reason="stop", usage=Usage(num_prompt_tokens=1, num_completion_tokens=1))
FAILED = Failed(kind="DeviceError", message="gone")


@pytest.mark.parametrize("end", [DONE, FAILED])
def test_stream_gives_events_in_order_and_stops_after_the_end(end: Event) -> None:
    async def main() -> None:
        queue = EventQueue(RequestId("r"))
        stream = queue.stream()
        events = [Queued(position=0), Segment(text="a"), end]
        for event in events:
            queue.put(event)
        queue.put(Segment(text="too late"))
        assert [event async for event in stream] == events
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


def test_stream_wakes_a_waiting_consumer() -> None:
    async def main() -> None:
        queue = EventQueue(RequestId("r"))
        stream = queue.stream()
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        queue.put(DONE)
        assert await waiting == DONE

    asyncio.run(main())


def test_stream_survives_a_consumer_that_was_cancelled_while_waiting() -> None:
    async def main() -> None:
        queue = EventQueue(RequestId("r"))
        stream = queue.stream()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.001)
        queue.put(DONE)
        assert await anext(stream) == DONE

    asyncio.run(main())


def test_stream_refuses_a_second_consumer() -> None:
    async def main() -> None:
        queue = EventQueue(RequestId("r"))
        stream = queue.stream()
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(StreamProtocol, match="two consumers"):
            await anext(stream)
        queue.put(DONE)
        await first

    asyncio.run(main())


def test_cancel_is_passed_on_once_and_from_any_thread() -> None:
    async def main() -> None:
        reasons: list[str] = []
        stream = EventQueue(RequestId("r"), on_cancel=reasons.append).stream()
        thread = threading.Thread(target=stream.cancel, args=("timeout",))
        thread.start()
        thread.join()
        stream.cancel("again")
        await asyncio.sleep(0)
        assert len(reasons) == 1

    asyncio.run(main())


def test_end_of_reasoning_is_passed_on_from_any_thread_while_the_request_runs() -> None:
    async def main() -> None:
        asked: list[int] = []
        queue = EventQueue(RequestId("r"), on_end_reasoning=lambda: asked.append(1))
        stream = queue.stream()
        thread = threading.Thread(target=stream.end_reasoning)
        thread.start()
        thread.join()
        await asyncio.sleep(0)
        stream.end_reasoning()
        assert asked == [1, 1]
        queue.put(DONE)
        stream.end_reasoning()
        assert asked == [1, 1]

    asyncio.run(main())


def test_dropping_a_stream_cancels_its_request() -> None:
    async def main() -> None:
        reasons: list[str] = []
        stream = EventQueue(RequestId("r"), on_cancel=reasons.append).stream()
        del stream
        gc.collect()
        await asyncio.sleep(0)
        assert reasons == ["disconnected"]

    asyncio.run(main())


def test_dropping_a_finished_stream_cancels_nothing() -> None:
    async def main() -> None:
        reasons: list[str] = []
        queue = EventQueue(RequestId("r"), on_cancel=reasons.append)
        queue.put(DONE)
        stream = queue.stream()
        del stream
        gc.collect()
        await asyncio.sleep(0)
        assert reasons == []

    asyncio.run(main())


def test_token_count_reads_running_totals_and_never_counts_twice() -> None:
    count = TokenCount()
    totals = [2, 2, 5, 5, 4]
    added = [count.added_by(Segment(text="x", num_completion_tokens=total)) for total in totals]
    assert added == [2, 0, 3, 0, 0]
    assert count.added_by(Queued(position=1)) == 0
