"""What goes wrong around a server: its engine is killed, clients do not read, send half, or leave while it loads."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.demo_server import CHAT, COMPLETIONS, CONTEXT, DEADLINE_S, MAX_ROWS, NAME, QUESTION, DemoServer, wait_for
from troth import compose
from troth.cli.served import engine_client, served_model
from troth.config.options import EngineOptions, ModelOptions, ServeOptions
from troth.serve.sse import EventSink
from troth.testing.fake_server import FakeServer

pytestmark = pytest.mark.e2e

PATIENCE_S = 1.5
"""Of the impatient server, with clients that do not read or do not finish what they send."""
NUM_STREAMS = MAX_ROWS + 3


def error_of(text: str) -> dict[str, Any]:
    """The error of a stream, which must be its last record."""
    *_, last = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    error = json.loads(last)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the engine's process in /proc")
def test_killed_engine_ends_every_stream_with_an_error_and_another_takes_its_place(server: DemoServer) -> None:
    expected = server.chat(max_tokens=3).json()["choices"]
    killed = server.engine_process_id
    begun = threading.Barrier(NUM_STREAMS + 1, timeout=DEADLINE_S)
    long: dict[str, Any] = {"messages": QUESTION, "max_tokens": 1000, "ignore_eos": True}

    def stream(http: httpx.Client) -> str:
        with http.stream("POST", CHAT, json={**long, "stream": True}) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            first = next(lines)
            begun.wait()
            return "\n".join([first, *lines])

    with httpx.Client(base_url=server.url, timeout=DEADLINE_S, trust_env=False) as http, _pool() as pool:
        whole = pool.submit(http.post, CHAT, json=long)
        streams = [pool.submit(stream, http) for _ in range(NUM_STREAMS)]
        # Running ones have their first token, waiting ones their first notice.
        begun.wait()
        os.kill(killed, signal.SIGKILL)
        for one in streams:
            text = one.result(DEADLINE_S)
            error = error_of(text)
            assert (error["type"], error["code"]) == ("server_error", "device_error")
            assert "engine process died (signal SIGKILL" in error["message"]
            assert "[DONE]" not in text
        assert whole.result(DEADLINE_S).status_code == 500
        assert whole.result().json()["error"]["code"] == "device_error"

    # The next process takes seconds to load; what comes now is told to try again, and leaves when it likes.
    refused = server.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert int(refused.headers["retry-after"]) >= 1
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == [NAME]
    body = json.dumps(long).encode()
    for cut in (len(body), len(body) // 2, 0):
        with connection(server.url) as raw:
            raw.sendall(head(CHAT, len(body)) + body[:cut])

    server.wait_until_ready()
    assert server.engine_process_id != killed
    assert server.chat(max_tokens=3).json()["choices"] == expected
    assert "engine process died (signal SIGKILL" in server.log.read_text()


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_STREAMS + 1)


@contextlib.contextmanager
def connection(url: str, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    """A plain socket to a server, for what no client library would do."""
    address = httpx.URL(url)
    assert address.port is not None
    with socket.socket() as raw:
        raw.settimeout(DEADLINE_S)
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.connect((address.host, address.port))
        yield raw


def head(path: str, num_bytes: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {num_bytes}\r\n\r\n".encode()


class Impatient:
    """A server in this process, with an engine process of its own."""

    def __init__(self, server: FakeServer, longest_token_id: int) -> None:
        self.url = server.url
        self.longest_token_id = longest_token_id
        """The token with the most bytes."""
        self.http = httpx.Client(base_url=server.url, timeout=DEADLINE_S, trust_env=False)

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/v1/status").json())

    def is_idle(self) -> bool:
        whole = self.status()
        engine = whole["engines"][0]["status"]
        # An engine that is busy for longer than a status waits says nothing of its rows.
        return bool(
            engine["state"] == "ready"
            and whole["generations_running"] == engine["num_running"] == 0
            and engine["blocks_used"] == [0]
        )


@pytest.fixture(scope="module")
def impatient(demo_model: None) -> Iterator[Impatient]:
    """Two rows, and nobody gets more than ``PATIENCE_S``."""
    model = ModelOptions(context_tokens=CONTEXT)
    text = compose.load_text(compose.find(model), model)
    engine = engine_client(NAME, model, EngineOptions(threads=1, max_rows=2, consumer_idle_s=PATIENCE_S))
    served = served_model(NAME, engine, text)
    longest = max(range(text.tokenizer.vocab_size), key=lambda token_id: len(text.tokenizer.token_bytes(token_id)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventSink, "stall_s", PATIENCE_S)
        # Stalls are looked for as often as silence is broken.
        with FakeServer([served], ServeOptions(port=0, keepalive_s=0.5), body_timeout_s=PATIENCE_S) as server:
            server.call(engine.start)
            one = Impatient(server, longest)
            wait_for(lambda: one.http.get("/health").status_code == 200)
            yield one
            one.http.close()


def test_client_that_never_reads_is_dropped_with_its_requests(impatient: Impatient) -> None:
    """Its echoed prompts are more than the sockets hold, so that the server soon cannot write."""
    wide = [impatient.longest_token_id] * (CONTEXT - 100)
    body = json.dumps(
        {"prompt": [[5, 6], [6, 7], *[wide] * 60], "echo": True, "stream": True, "max_tokens": 90, "ignore_eos": True}
    ).encode()
    with connection(impatient.url, receive_bytes=4096) as raw:
        raw.sendall(head(COMPLETIONS, len(body)) + body)
        wait_for(lambda: impatient.status()["generations_running"] == 1)
        # It holds both rows; who comes now waits until it is dropped, and is answered.
        patient = impatient.http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 2})
        assert patient.json()["usage"]["completion_tokens"] == 2
        wait_for(impatient.is_idle, lambda: str(impatient.status()))
    ends = impatient.status()["engines"][0]["status"]["num_requests_by_end"]
    assert ends == {"Cancelled": 62, "length": 1}


def test_bodies_that_stop_halfway_are_given_up(impatient: Impatient) -> None:
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(connection(impatient.url)) for _ in range(5)]
        for raw in halves:
            raw.sendall(head(CHAT, 1000) + b'{"messages": [')
        answered = impatient.http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 2})
        assert answered.json()["usage"]["completion_tokens"] == 2
        # One has gone away itself.
        halves.pop().close()
        for raw in halves:
            with raw.makefile("rb") as replies:
                reply = replies.read()
            assert reply.startswith(b"HTTP/1.1 408 ")
            assert b"14 bytes came" in reply
    assert impatient.is_idle()
