"""Many streams at once against ``troth serve``: neighbours change nothing, and those that are dropped leave nothing."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.e2e.demo_server import CHAT, COMPLETIONS, DEADLINE_S, MAX_ROWS, MAX_WAITING, DemoServer, wait_for

pytestmark = pytest.mark.e2e

NUM_TOGETHER = 16
NUM_KILLED = 100
MOST_AT_ONCE = 60
"""Rows and queue together hold 72; nobody is to be refused."""


@dataclass
class Answer:
    """What one chat came to."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)


def bodies() -> list[dict[str, Any]]:
    """Chats of different lengths, warm and cold."""
    chance = random.Random(5)
    subjects = ["tea", "rain", "the moon and the sea", "a", "Grüße", "7 * 8", "prime numbers below twenty", "dogs"]
    return [
        {
            "messages": [
                {"role": "system", "content": "Be brief. " * chance.randrange(1, 3)},
                {"role": "user", "content": f"Tell me about {subjects[index % 8]}."},
            ],
            "max_tokens": chance.randrange(1, 17),
            "temperature": 0.7 if index % 2 else 0,
            "seed": 1000 + index // 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for index in range(NUM_TOGETHER)
    ]


class Chats:
    """Streams chats, and counts how many are in mid-answer at once."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._num_open = 0
        self.most_open = 0

    async def ask(self, body: dict[str, Any]) -> Answer:
        answer, is_open = Answer(), False
        async with self._http.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for record in records(response):
                # What came from the cache differs with the company, and nothing else may.
                counted = {k: v for k, v in (record.get("usage") or {}).items() if k != "prompt_tokens_details"}
                answer.usage = counted or answer.usage
                for choice in record["choices"]:
                    answer.text += choice["delta"].get("content") or ""
                    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                if answer.text and not is_open:
                    is_open, self._num_open = True, self._num_open + 1
                    self.most_open = max(self.most_open, self._num_open)
        self._num_open -= is_open
        return answer


async def records(response: httpx.Response) -> Any:
    """The data of a stream, up to [DONE]."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def client_of(server: DemoServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, trust_env=False, limits=limits)


def test_streams_together_get_what_each_gets_alone(server: DemoServer) -> None:
    """Done-when of the server: at temperature 0 and above, in any company, twice the rows there are."""

    async def scenario() -> None:
        async with client_of(server) as http:
            alone = [await Chats(http).ask(body) for body in bodies()]
            company = Chats(http)
            together = await asyncio.gather(*(company.ask(body) for body in bodies()))
        assert together == alone
        assert company.most_open >= 4, "they hardly met"
        assert {answer.finish_reason for answer in alone} <= {"stop", "length"}
        lengths = [answer.usage["completion_tokens"] for answer in alone]
        assert len(set(lengths)) > 4
        assert all(count <= body["max_tokens"] for count, body in zip(lengths, bodies(), strict=True))

    asyncio.run(scenario())


async def drop(http: httpx.AsyncClient, chance: random.Random, gate: asyncio.Semaphore) -> int | None:
    """Start a long stream and close its connection somewhere; the number of records read, None before any."""
    long: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "stream": True, "seed": chance.randrange(2**32)}
    words = "word " * chance.choice([1, 2, 3, 40])
    path, body = COMPLETIONS, {"prompt": words, **long}
    if chance.random() < 0.25:
        path, body = CHAT, {"messages": [{"role": "user", "content": words}], "n": chance.choice([1, 1, 2]), **long}
    num_records = chance.choice([None, 0, 0, 1, 1, 2, 3, 5])
    patience_s = chance.random() / 2

    async def read() -> int:
        num_read = 0
        async with http.stream("POST", path, json=body) as response:
            if response.status_code == 429:
                # Others were dropped faster than the server could end them: as it says, later.
                await asyncio.sleep(0.2)
                return await read()
            assert response.status_code == 200, await response.aread()
            if num_records:
                async for _ in records(response):
                    num_read += 1
                    if num_read == num_records:
                        break
        return num_read

    async with gate:
        if num_records is not None:
            return await read()
        # Gone before the first byte of an answer, perhaps before the server has read the whole request.
        reading = asyncio.ensure_future(read())
        await asyncio.sleep(patience_s)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return None


def test_streams_killed_midway_leave_no_block_behind(server: DemoServer) -> None:
    """Done-when of the server: before the first record, while queued or in mid-answer."""
    expected = server.chat(max_tokens=6).json()["choices"]
    before = server.ends()

    async def scenario() -> list[int | None]:
        chance, gate = random.Random(9), asyncio.Semaphore(MOST_AT_ONCE)
        async with client_of(server) as http:
            return await asyncio.gather(*(drop(http, chance, gate) for _ in range(NUM_KILLED)))

    read = asyncio.run(scenario())
    assert None in read
    assert {0, 1, 5} <= set(read)
    server.wait_until_idle()
    ended = {end: count - before.get(end, 0) for end, count in server.ends().items() if count != before.get(end, 0)}
    # None ran to its end. Those that left before an answer may be missing, or refused because the queue was full just
    # then; for the others that would not have been a 200.
    assert {"Cancelled"} <= set(ended) <= {"Cancelled", "Busy"}
    assert ended["Cancelled"] >= NUM_KILLED - read.count(None)
    assert server.chat(max_tokens=6).json()["choices"] == expected


def test_full_queue_is_told_with_429_and_empties(server: DemoServer) -> None:
    most: dict[str, Any] = {"prompt": "Hi", "n": MAX_ROWS + MAX_WAITING, "max_tokens": 400, "ignore_eos": True}
    with server.http.stream("POST", COMPLETIONS, json={**most, "stream": True}) as running:
        assert running.status_code == 200
        lines = running.iter_lines()  # dropping it would close the stream
        assert next(lines).startswith("data: ")
        # The first answer may have begun before the others got their rows.
        wait_for(lambda: server.status()["num_waiting"] == MAX_WAITING)
        for stream in (False, True):
            refused = server.chat(stream=stream)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
            assert int(refused.headers["retry-after"]) >= 1
    server.wait_until_idle()
    assert server.chat().status_code == 200
