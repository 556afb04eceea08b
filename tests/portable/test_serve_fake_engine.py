"""The fake engine keeps the contract of a real one; what it lacks, tests of servers would miss."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from troth.contracts.events import Completed, Event, Failed, Prefill, Queued, Segment
from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.errors import NotReady
from troth.testing.byte_tokenizer import EOS_ID, BytePrompts, ByteTokenizer
from troth.testing.fake_engine import FakeAnswer, FakeEngine


def request(name: str = "r", **changes: Any) -> Request:
    values: dict[str, Any] = {"prompt_ids": (1, 2, 3), "eos_ids": frozenset({EOS_ID})}
    return Request(request_id=RequestId(name), **values | changes)


async def events_of(engine: FakeEngine, one: Request) -> list[Event]:
    return [event async for event in engine.submit(one)]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def segments(events: list[Event]) -> list[Segment]:
    return [event for event in events if isinstance(event, Segment)]


def test_fake_engine_follows_the_order_of_events() -> None:
    async def main() -> None:
        answer = FakeAnswer(text="aß", reasoning="r", chunk_tokens=2)
        events = await events_of(FakeEngine(answer), request())
        kinds = [type(event) for event in events]
        assert kinds == [Prefill, Prefill, Prefill, *[Segment] * 5, Completed]
        assert [event.num_done for event in events if isinstance(event, Prefill)] == [0, 2, 3]
        assert [one.text for one in segments(events)] == ["r", "a", "", "ß", ""]
        assert [one.num_completion_tokens for one in segments(events)] == [1, 2, 3, 4, 5]
        last = events[-1]
        assert isinstance(last, Completed)
        assert (last.finish_reason, last.usage.num_completion_tokens) == ("stop", 5)
        assert last.usage.num_reasoning_tokens == 1

    run(main())


def test_fake_engine_ends_at_the_limit_and_flushes_half_a_character() -> None:
    async def main() -> None:
        events = await events_of(FakeEngine("ß"), request(max_tokens=1))
        assert [one.text for one in segments(events)] == ["\ufffd"]
        assert isinstance(events[-1], Completed)
        assert events[-1].finish_reason == "length"

    run(main())


def test_fake_engine_names_the_stop_string_and_hides_it() -> None:
    async def main() -> None:
        events = await events_of(FakeEngine("one two three"), request(stop=("three", "two")))
        assert "".join(one.text for one in segments(events)) == "one "
        assert isinstance(events[-1], Completed)
        assert (events[-1].finish_reason, events[-1].stop_match) == ("stop", "two")

    run(main())


def test_fake_engine_queues_refuses_and_admits_in_order() -> None:
    async def main() -> None:
        engine = FakeEngine("x", max_rows=1, max_waiting=1)
        streams = [engine.submit(request(str(number))) for number in range(3)]
        first = [await anext(stream) for stream in streams]
        assert isinstance(first[0], Prefill)
        assert first[1] == Queued(position=0)
        assert isinstance(first[2], Failed)
        assert first[2].kind == "Busy"
        for stream in streams[:2]:
            *_, last = [event async for event in stream]
            assert isinstance(last, Completed)

    run(main())


@pytest.mark.parametrize(
    ("changes", "kind", "code"),
    [
        ({"max_tokens": 100}, "ContextExceeded", "context_length_exceeded"),
        ({"prompt_ids": ()}, "RequestError", "invalid_value"),
    ],
)
def test_fake_engine_refuses_what_can_never_run(changes: dict[str, Any], kind: str, code: str) -> None:
    async def main() -> None:
        (failed,) = await events_of(FakeEngine(context_tokens=64), request(**changes))
        assert isinstance(failed, Failed)
        assert (failed.kind, failed.code) == (kind, code)

    run(main())


def test_fake_engine_holds_a_row_whose_consumer_does_not_read() -> None:
    async def main() -> None:
        engine = FakeEngine("x")
        idle = engine.submit(request("idle", eos_ids=frozenset(), max_tokens=500))
        quick = await events_of(engine, request("quick", eos_ids=frozenset(), max_tokens=500))
        assert len(segments(quick)) == 500
        assert idle._queue.num_queued == 32
        assert len(segments([event async for event in idle])) == 500

    run(main())


def test_fake_engine_gives_an_idle_consumer_up() -> None:
    async def main() -> None:
        engine = FakeEngine("x", consumer_idle_s=0.02)
        idle = engine.submit(request(eos_ids=frozenset(), max_tokens=500))
        while not (await engine.status()).num_requests_by_end:
            await asyncio.sleep(0.005)
        *_, last = [event async for event in idle]
        assert isinstance(last, Failed)
        assert "consumer_idle" in last.message

    run(main())


def test_fake_engine_reports_logprobs_where_asked() -> None:
    async def main() -> None:
        sampling = SamplingParams(logprobs=2, prompt_logprobs=0)
        events = await events_of(FakeEngine("a"), request(sampling=sampling))
        (token,) = segments(events)[0].tokens
        assert token.logprobs is not None
        assert token.logprobs.top_ids == [97, 98]
        last = events[-1]
        assert isinstance(last, Completed)
        assert last.prompt_logprobs is not None
        assert [one.token_id for one in last.prompt_logprobs] == [2, 3]

    run(main())


def test_fake_engine_refuses_after_aclose_and_ends_what_runs() -> None:
    async def main() -> None:
        engine = FakeEngine("x", step_s=0.001)
        stream = engine.submit(request(eos_ids=frozenset()))
        await anext(stream)
        await engine.aclose()
        *_, last = [event async for event in stream]
        assert isinstance(last, Failed)
        assert last.kind == "Cancelled"
        with pytest.raises(NotReady):
            _ = engine.info

    run(main())


def test_byte_tokenizer_is_lossless_and_shows_no_end_token() -> None:
    tokenizer = ByteTokenizer()
    text = "Grüße 世界 \x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([104, 105, EOS_ID]) == "hi"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_byte_prompts_mark_the_boundary_before_the_generation_prompt() -> None:
    prompt = BytePrompts().chat([{"role": "user", "content": "hi"}])
    assert prompt.text == "user: hi\nassistant: "
    assert prompt.boundary is not None
    assert bytes(prompt.ids[: prompt.boundary]) == b"user: hi\n"
