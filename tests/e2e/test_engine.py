"""The Python face with the demo model: threads, tasks, and every way to leave an answer before its end."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.conftest import ENGINE_CONTEXT, open_engine, require_idle
from tests.e2e.demo_server import DEADLINE_S, QUESTION, wait_for
from troth.answer_stream import AnswerStream
from troth.artifact.resolve import resolve
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.events import Completed, Prefill, Segment
from troth.contracts.speculation import Speculation
from troth.errors import Cancelled, ContextExceeded, RequestError
from troth.library import Engine
from troth.run.stream import MAX_EVENTS

pytestmark = pytest.mark.e2e

ANSWER = "The capital of France is"
LONG = "Count from one to one thousand in words."
PROMPTS = ["Hi", "One, two,", "The sea", "def f(x):", "Grüße", "A B C D E", "Once upon a time", "1 + 1 ="]


def wishes(index: int) -> dict[str, Any]:
    """Different lengths and temperatures."""
    return {"max_tokens": 2 + index, "temperature": 0.7 * (index % 2), "seed": index}


@pytest.fixture(scope="module")
def expected(running_engine: Engine) -> list[str]:
    """What each prompt gets alone."""
    return [running_engine.complete(prompt, **wishes(index)).text for index, prompt in enumerate(PROMPTS)]


def endless(engine: Engine, **options: Any) -> AnswerStream:
    """An answer that ends when the context does, long after any test."""
    return engine.stream(LONG, ignore_eos=True, temperature=0, **options)


def ends_of(engine: Engine) -> dict[str, int]:
    return engine.status().num_requests_by_end


def test_chat_answers_whole_and_in_segments(engine: Engine) -> None:
    whole = engine.chat(QUESTION, temperature=0, max_tokens=6)
    assert whole.text.startswith(ANSWER)
    assert (whole.finish_reason, whole.usage.num_completion_tokens) == ("length", 6)
    with engine.stream(QUESTION[0]["content"], temperature=0, max_tokens=6) as stream:
        segments = list(stream)
    assert "".join(segment.text for segment in segments) == stream.reply.text == whole.text
    counts = [segment.num_completion_tokens for segment in segments]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert replace(stream.reply.usage, num_cached_tokens=0) == replace(whole.usage, num_cached_tokens=0)


def test_events_tell_of_the_prompt_then_the_answer(engine: Engine) -> None:
    events = list(engine.stream(QUESTION, max_tokens=2).events())
    prefills = [event for event in events if isinstance(event, Prefill)]
    assert events[: len(prefills)] == prefills
    assert (prefills[0].num_done, prefills[-1].num_done) == (0, prefills[-1].num_total)
    assert all(isinstance(event, Segment) for event in events[len(prefills) : -1])
    assert isinstance(events[-1], Completed)
    assert events[-1].usage.num_prompt_tokens == prefills[0].num_total


def test_threads_ask_at_once_and_each_gets_its_own_answer(engine: Engine, expected: list[str]) -> None:
    start = threading.Barrier(len(PROMPTS), timeout=DEADLINE_S)

    def ask(index: int) -> str:
        start.wait()
        return "".join(segment.text for segment in engine.stream_completion(PROMPTS[index], **wishes(index)))

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, range(len(PROMPTS)), timeout=DEADLINE_S)) == expected


def test_tasks_ask_at_once_and_each_gets_its_own_answer(engine: Engine, expected: list[str]) -> None:
    async def ask(index: int) -> str:
        if index % 2:
            return (await engine.complete_async(PROMPTS[index], **wishes(index))).text
        async with engine.stream_completion(PROMPTS[index], **wishes(index)) as stream:
            return "".join([segment.text async for segment in stream])

    async def scenario() -> list[str]:
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.gather(*map(ask, range(len(PROMPTS))))

    assert asyncio.run(scenario()) == expected


def test_leaving_the_with_cancels(engine: Engine) -> None:
    before = ends_of(engine).get("aborted", 0)
    with endless(engine) as stream:
        next(iter(stream))
        assert engine.status().num_running == 1
    require_idle(engine)
    assert ends_of(engine)["aborted"] == before + 1
    # What there is can still be read, up to an end that says so.
    rest = list(stream)
    assert stream.reply.finish_reason == "aborted"
    assert stream.reply.text.endswith("".join(segment.text for segment in rest))


def test_cancel_before_the_first_token_and_while_waiting_for_a_row(engine: Engine) -> None:
    streams = [endless(engine) for _ in range(engine.info.max_rows + 3)]
    wait_for(lambda: engine.status().num_waiting == 3)
    for stream in reversed(streams):
        stream.cancel()
        stream.cancel()
    for stream in streams:
        for _ in stream:
            pass
        assert stream.reply.finish_reason == "aborted"
    assert streams[-1].reply.usage.num_completion_tokens == 0


def test_dropping_streams_unread_cancels_them(engine: Engine) -> None:
    before = ends_of(engine).get("Cancelled", 0)
    streams = [endless(engine) for _ in range(6)]
    next(iter(streams[0]))
    status = engine.status()
    assert status.num_running + status.num_waiting == 6
    del streams
    gc.collect()
    require_idle(engine)
    assert ends_of(engine)["Cancelled"] == before + 6


def fail_inside_with(engine: Engine) -> None:
    with endless(engine) as stream:
        for _ in stream:
            raise ZeroDivisionError


def fail_over_a_nameless_stream(engine: Engine) -> None:
    for _ in endless(engine):
        raise ZeroDivisionError


@pytest.mark.parametrize("consume", [fail_inside_with, fail_over_a_nameless_stream])
def test_exception_in_a_consumer_cancels_its_answer(engine: Engine, consume: Callable[[Engine], None]) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        consume(engine)
    require_idle(engine)
    assert raised.traceback, "the traceback is still held, and with it the consumer's frame"


def test_exception_that_holds_the_stream_cancels_when_it_is_dropped(engine: Engine) -> None:
    def consume() -> None:
        stream = endless(engine)
        for _ in stream:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        consume()
    assert engine.status().num_running == 1
    del raised
    gc.collect()
    require_idle(engine)


def test_cancelled_tasks_cancel_their_answers(engine: Engine) -> None:
    async def read() -> None:
        async with endless(engine) as stream:
            async for _ in stream:
                pass

    async def scenario() -> None:
        reading = [asyncio.ensure_future(read()) for _ in range(3)]
        drained = asyncio.ensure_future(engine.chat_async(LONG, ignore_eos=True))
        while engine.status().num_running < 4:
            await asyncio.sleep(0.05)
        for task in (*reading, drained):
            task.cancel()
        ends = await asyncio.gather(*reading, drained, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    gc.collect()
    require_idle(engine)


def test_event_loop_that_ends_in_mid_answer_does_the_engine_no_harm(engine: Engine) -> None:
    async def leave() -> AnswerStream:
        stream = endless(engine)
        async for _ in stream:
            break
        return stream

    stream = asyncio.run(asyncio.wait_for(leave(), DEADLINE_S))
    # Another loop, or none, may go on reading.
    assert next(iter(stream)).text
    stream.cancel()


def test_prompt_cache_is_shared_within_a_salt_alone(engine: Engine) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8

    def cached(**options: Any) -> int:
        return engine.complete(prompt, max_tokens=1, temperature=0, **options).usage.num_cached_tokens

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0
    assert cached(cache_salt="one", prompt_cache=False) == 0
    with pytest.raises(RequestError, match="cache_salt"):
        cached(cache_salt=3)


def test_complete_all_answers_each_as_if_it_were_alone(engine: Engine) -> None:
    """Long ones too: nobody reads them before their end, and none is held for it."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 2 * MAX_EVENTS, "ignore_eos": True}
    together = engine.complete_all(PROMPTS[:4], **options)
    assert [reply.text for reply in together] == [engine.complete(one, **options).text for one in PROMPTS[:4]]
    assert [reply.usage.num_completion_tokens for reply in together] == [2 * MAX_EVENTS] * 4


def test_complete_all_raises_what_one_of_them_cannot_be(engine: Engine) -> None:
    with pytest.raises(ContextExceeded):
        engine.complete_all(["Hi", "word " * 9000], max_tokens=4)
    while engine.status().num_running:
        time.sleep(0.01)
    assert engine.complete("Hi", max_tokens=2).usage.num_completion_tokens == 2


def test_complete_all_gives_the_others_up_although_the_error_is_kept(engine: Engine) -> None:
    """A kept error holds the frames in which the streams were: they ran to their ends, read by nobody."""
    with pytest.raises(ContextExceeded) as kept:
        engine.complete_all(["Hi", "Ho", "word " * 9000], max_tokens=1500, ignore_eos=True)
    before = engine.status()
    while (after := engine.status()).num_running + after.num_waiting:
        time.sleep(0.01)
    assert after.num_completion_tokens - before.num_completion_tokens < 1000, kept


def test_consumer_that_falls_behind_misses_nothing(engine: Engine) -> None:
    """Its row is held once its queue is full, beside a neighbour that is not."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_EVENTS + 14, "ignore_eos": True}
    late = engine.stream("Name ten animals.", **options)
    prompt_reply = engine.chat("Name ten animals.", **options)
    assert engine.status().num_running == 1, "the unread answer is held, not ended"
    assert "".join(segment.text for segment in late) == prompt_reply.text
    assert replace(late.reply.usage, num_cached_tokens=0) == replace(prompt_reply.usage, num_cached_tokens=0)


def test_engine_answers_after_every_kind_of_error(engine: Engine, expected: list[str]) -> None:
    for _ in range(3):
        with pytest.raises(RequestError):
            engine.chat([])
        with pytest.raises(RequestError):
            engine.complete("x", temperature=-1)
        with pytest.raises(RequestError):
            engine.complete("")
        with pytest.raises(ContextExceeded):
            engine.complete("x", max_tokens=10**6)
        with pytest.raises(ContextExceeded):
            engine.complete("x " * 5000)
    assert engine.complete(PROMPTS[3], **wishes(3)).text == expected[3]


def test_reply_is_not_to_be_had_before_the_end(engine: Engine) -> None:
    with endless(engine) as stream, pytest.raises(RuntimeError, match="iterate the stream to its end"):
        _ = stream.reply


def test_two_engines_work_side_by_side_and_closing_one_ends_its_answers_alone(
    engine: Engine, expected: list[str]
) -> None:
    other = open_engine()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda one: one.complete(PROMPTS[4], **wishes(4)).text, (engine, other)))
    assert answers == [expected[4], expected[4]]

    running = [endless(other) for _ in range(3)]
    for stream in running:
        next(iter(stream))
    waiting = [endless(other) for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(engine.complete, PROMPTS[5], **wishes(5))
        other.close()
        other.close()
        assert neighbour.result(DEADLINE_S).text == expected[5]
    for stream in (*running, *waiting):
        with pytest.raises(Cancelled) as ended:
            list(stream)
        assert ended.value.reason == "engine_closed"
    status = other.status()
    assert (status.state, status.num_running, status.num_waiting, status.blocks_used) == ("closed", 0, 0, (0,))
    with pytest.raises(Cancelled):
        other.chat("Hi")
    with pytest.raises(Cancelled):
        asyncio.run(other.chat_async("Hi"))


def test_second_model_drafts_and_changes_no_answer(engine: Engine) -> None:
    options = EngineOptions(threads=1, max_rows=4, draft_model=str(resolve(None).files[0].path))
    wanted = Speculation(sources=("draft",), depth=3, adaptive=False)
    with Engine.open(model_options=ModelOptions(context_tokens=ENGINE_CONTEXT), engine_options=options) as drafting:
        for index, prompt in enumerate(PROMPTS[:2]):
            reply = drafting.complete(prompt, **wishes(8 + index), speculation=wanted)
            assert reply.text == engine.complete(prompt, **wishes(8 + index)).text
            assert reply.speculation is not None
            assert reply.speculation.num_accepted > reply.speculation.num_drafted // 2  # it is the same model
