"""Streams over real sockets: timing of the first byte, keep-alives, disconnects, timeouts, limits, framing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.portable.serving import (
    CHAT,
    COMPLETIONS,
    error_of,
    eventually,
    hello,
    post_head,
    raw_connection,
    records,
    serving,
    streamed_text,
)
from troth.config.options import ServeOptions
from troth.contracts.events import Failed
from troth.serve.listen import Server, bind
from troth.serve.sse import EventSink
from troth.testing.fake_engine import FakeAnswer, FakeEngine
from troth.testing.fake_server import FakeServer

ENDLESS = FakeAnswer(text="word ")


@contextmanager
def small_buffers(server: FakeServer) -> Iterator[socket.socket]:
    """A connection whose buffers hold little, so that not reading is soon felt."""
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(server.address)
        yield raw


def endless(**fields: object) -> dict[str, object]:
    return hello(ignore_eos=True, **fields)


def test_stream_over_a_socket_equals_the_whole_answer() -> None:
    """The records leave through ``connection.py`` here, not as ASGI messages."""
    answer = FakeAnswer(text="Grüße an die 世界 🌍!" * 20)
    with serving(FakeEngine(answer)) as (_, client):
        stream = records(client.post(CHAT, json=hello(stream=True)).text)
        again = records(client.post(CHAT, json=hello(stream=True)).text)
    assert streamed_text(stream) == streamed_text(again) == answer.text


def test_stream_arrives_while_it_is_generated() -> None:
    with (
        serving(FakeEngine(ENDLESS, step_s=0.005)) as (_, client),
        client.stream("POST", CHAT, json=endless(stream=True)) as response,
    ):
        lines = response.iter_lines()
        early = [next(lines) for _ in range(6)]
    assert '"role":"assistant"' in early[0]
    assert '"content":"w"' in early[2]


def test_stream_to_http_1_0_is_not_chunked_and_ends_with_the_connection() -> None:
    body = json.dumps(hello(stream=True)).encode()
    with serving(FakeEngine("abc")) as (server, _), raw_connection(server) as raw:
        raw.sendall(post_head(CHAT, len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        reply = b""
        while data := raw.recv(65536):
            reply += data
    head, _, rest = reply.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert streamed_text(records(rest.decode())) == "abc"


def test_connection_is_reused_after_a_stream() -> None:
    body = json.dumps(hello(stream=True)).encode()
    with serving(FakeEngine("abc")) as (server, _), raw_connection(server) as raw:
        for _ in range(3):
            raw.sendall(post_head(CHAT, len(body)) + body)
            reply = b""
            while not reply.endswith(b"0\r\n\r\n"):
                reply += raw.recv(65536)
            assert reply.count(b"HTTP/1.1 200") == 1
            assert reply.count(b"[DONE]") == 1


def test_keep_alive_comments_fill_the_silence_of_a_long_prefill() -> None:
    answer = FakeAnswer(text="x", chunk_tokens=10)
    with serving(FakeEngine(answer, step_s=0.25), keepalive_s=0.05) as (_, client):
        text = client.post(CHAT, json=hello(stream=True)).text
    assert text.count(": keep-alive\n\n") >= 3
    assert streamed_text(records(text)) == "x"


def test_keep_alive_begins_a_stream_whose_first_chunk_takes_long() -> None:
    """On a slow machine one chunk can outlast a client's patience; its status is given up for a sign of life."""
    failing = FakeAnswer(failure=Failed(kind="DeviceError", message="late"))
    with serving(FakeEngine("x", step_s=0.3), keepalive_s=0.05) as (_, client):
        text = client.post(CHAT, json=hello(stream=True)).text
    assert text.index('"role":"assistant"') < text.index(": keep-alive") < text.index('"content":"x"')
    with serving(FakeEngine(failing, step_s=0.3), keepalive_s=0.05) as (_, client):
        response = client.post(CHAT, json=hello(stream=True))
    assert response.status_code == 200
    assert '"message":"late"' in response.text


def test_keep_alive_comments_stay_out_of_a_busy_stream() -> None:
    with serving(FakeEngine("x" * 100, step_s=0.002), keepalive_s=1.0) as (_, client):
        assert ": keep-alive" not in client.post(CHAT, json=hello(stream=True)).text


def test_queued_stream_begins_at_once_and_tells_its_place() -> None:
    engine = FakeEngine(ENDLESS, max_rows=1, step_s=0.002)
    with serving(engine) as (_, client), client.stream("POST", CHAT, json=endless(stream=True)) as running:
        running_lines = running.iter_lines()
        next(running_lines)
        body = endless(stream=True, stream_options={"include_progress": True})
        with client.stream("POST", CHAT, json=body) as waiting:
            lines = (line for line in waiting.iter_lines() if line)
            assert '"role"' in next(lines)
            notice = json.loads(next(lines).removeprefix("data: "))
    assert notice["choices"] == []
    assert notice["troth"] == {"queued": {"position": 0}}


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_a_running_request_within_a_step(stream: bool) -> None:
    engine = FakeEngine(ENDLESS, step_s=0.01)
    body = json.dumps(endless(stream=stream)).encode()
    with serving(engine) as (server, _):
        with raw_connection(server) as raw:
            raw.sendall(post_head(CHAT, len(body)) + body)
            eventually(lambda: server.run(engine.status()).num_running == 1)
            steps = server.run(engine.status()).num_steps
        eventually(lambda: bool(engine.cancelled))
        assert engine.cancelled[0][1] == "disconnected"
        assert server.run(engine.status()).num_running == 0
        assert server.run(engine.status()).num_steps - steps < 30


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_of_a_queued_request_leaves_the_running_one_alone(stream: bool) -> None:
    engine = FakeEngine(FakeAnswer(text="x" * 150), max_rows=1, step_s=0.005)
    body = json.dumps(hello(stream=stream)).encode()
    with serving(engine) as (server, client), client.stream("POST", CHAT, json=hello(stream=True)) as running:
        lines = running.iter_lines()
        next(lines)
        with raw_connection(server) as raw:
            raw.sendall(post_head(CHAT, len(body)) + body)
            eventually(lambda: server.run(engine.status()).num_waiting == 1)
        eventually(lambda: server.run(engine.status()).num_waiting == 0)
        rest = "\n".join(lines)
    assert rest.rstrip().endswith("[DONE]")
    assert [reason for _, reason in engine.cancelled] == ["disconnected"]


def test_disconnect_of_many_choices_cancels_every_one() -> None:
    engine = FakeEngine(ENDLESS, step_s=0.005)
    body = json.dumps({"prompt": ["a", "b"], "n": 3, "ignore_eos": True, "stream": True}).encode()
    with serving(engine) as (server, _):
        with raw_connection(server) as raw:
            raw.sendall(post_head(COMPLETIONS, len(body)) + body)
            eventually(lambda: server.run(engine.status()).num_running == 6)
        eventually(lambda: len(engine.cancelled) == 6)


@pytest.mark.parametrize("stream", [True, False])
def test_time_limit_cancels_the_request(stream: bool) -> None:
    engine = FakeEngine(ENDLESS, step_s=0.01)
    with serving(engine, request_timeout_s=0.2) as (_, client):
        response = client.post(CHAT, json=endless(stream=stream))
        eventually(lambda: [reason for _, reason in engine.cancelled] == ["timeout"])
    if stream:
        assert response.status_code == 200
        last = response.text.splitlines()[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
    else:
        assert response.status_code == 504
        assert error_of(response)["code"] == "request_timeout"
        assert response.headers["x-should-retry"] == "false"


def test_answers_beyond_the_limit_of_the_server_are_429() -> None:
    engine = FakeEngine(ENDLESS, step_s=0.005)
    with serving(engine, max_streams=2) as (server, client):
        with (
            client.stream("POST", CHAT, json=endless(stream=True)),
            client.stream("POST", CHAT, json=endless(stream=True)),
        ):
            refused = client.post(CHAT, json=hello())
            assert refused.status_code == 429
            assert "retry-after" in refused.headers
        eventually(lambda: server.run(engine.status()).num_running == 0)
        assert client.post(CHAT, json=hello(max_tokens=1)).status_code == 200


def test_slow_reader_is_dropped_by_the_engine_and_holds_nobody_else() -> None:
    """Its row is held once every buffer between is full; the engine gives it up after consumer_idle_s."""
    engine = FakeEngine(
        FakeAnswer(text="0123456789" * 100, step_tokens=1000), context_tokens=1 << 30, consumer_idle_s=0.3
    )
    body = json.dumps(endless(stream=True, max_tokens=20_000_000)).encode()
    with serving(engine) as (server, client), small_buffers(server) as raw:
        raw.sendall(post_head(CHAT, len(body)) + body)
        eventually(lambda: server.run(engine.status()).num_running == 1)
        began = time.monotonic()
        assert client.post(CHAT, json=hello(max_tokens=3000)).status_code == 200
        assert time.monotonic() - began < 5
        eventually(lambda: server.run(engine.status()).num_requests_by_end.get("Cancelled") == 1)


def test_stalled_client_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads nothing must not keep one of the server's places for ever."""
    monkeypatch.setattr(EventSink, "stall_s", 0.3)
    engine = FakeEngine(FakeAnswer(text="0123456789" * 100, step_tokens=1000), context_tokens=1 << 30)
    body = json.dumps(endless(stream=True, max_tokens=20_000_000)).encode()
    with serving(engine, max_streams=1, keepalive_s=0.1) as (server, client), small_buffers(server) as raw:
        raw.sendall(post_head(CHAT, len(body)) + body)
        eventually(lambda: [reason for _, reason in engine.cancelled] == ["consumer_idle"])
        eventually(lambda: client.post(CHAT, json=hello(max_tokens=1)).status_code == 200)


def test_thousand_small_requests_are_all_answered() -> None:
    engine = FakeEngine("ok", max_rows=64, max_waiting=1000)
    texts: list[str] = []

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, timeout=30, verify=False) as client:
            for _ in range(125):
                texts.append(client.post(CHAT, json=hello()).json()["choices"][0]["message"]["content"])

    with serving(engine) as (server, client):
        threads = [threading.Thread(target=ask, args=(server.url,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == ["ok"] * 1000
        assert (
            'troth_http_responses_total{route="/v1/chat/completions",status="200"} 1000.0'
            in client.get("/metrics").text
        )
        assert server.run(engine.status()).num_running == 0


def test_server_that_stops_lets_answers_end_and_then_tells_why_it_ends_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Server, "grace_s", 0.3)
    engine = FakeEngine(ENDLESS, step_s=0.005)
    with (
        serving(engine) as (server, client),
        client.stream("POST", CHAT, json=endless(stream=True)) as long,
        client.stream("POST", CHAT, json=endless(stream=True, max_tokens=20)) as short,
    ):
        assert long.status_code == short.status_code == 200
        server.server.should_exit = True
        assert short.read().endswith(b"data: [DONE]\n\n")
        *_, last = long.read().decode().strip().splitlines()
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"
    assert not caplog.records


def test_listening_socket_names_its_protocol() -> None:
    """Else asyncio leaves Nagle's algorithm on, and every other token waits 40 ms for an acknowledgement."""
    with bind(ServeOptions(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_address_in_use_is_an_error_of_the_caller() -> None:
    with bind(ServeOptions(port=0)) as listener:
        listener.listen()
        with pytest.raises(OSError, match="in use"):
            bind(ServeOptions(port=listener.getsockname()[1]))
