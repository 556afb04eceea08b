"""Clients that mean no good, or have bad luck: half requests, huge ones, garbage. The server answers the next one."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.portable.serving import CHAT, error_of, eventually, hello, post_head, raw_connection, serving
from troth.serve.connection import Connection
from troth.testing.byte_tokenizer import BytePrompts
from troth.testing.fake_engine import FakeAnswer, FakeEngine
from troth.testing.fake_server import FakeServer, byte_model

CAP = 1 << 20


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeServer, httpx.Client]]:
    """One server for all, so that each test also proves that the ones before did it no harm."""
    with serving(FakeEngine("fine"), max_body_bytes=CAP, body_timeout_s=0.4) as pair:
        yield pair


@pytest.fixture(autouse=True)
def answers_afterwards(served: tuple[FakeServer, httpx.Client]) -> Iterator[None]:
    """The law of this file."""
    yield
    _, client = served
    assert client.post(CHAT, json=hello()).json()["choices"][0]["message"]["content"] == "fine"
    assert client.get("/v1/status").json()["generations_running"] == 0


def reply_to(server: FakeServer, *pieces: bytes) -> bytes:
    """Everything the server says to the pieces before it closes."""
    with raw_connection(server) as raw:
        for piece in pieces:
            raw.sendall(piece)
        reply = b""
        while data := raw.recv(65536):
            reply += data
        return reply


@pytest.mark.parametrize("declared", [True, False])
def test_body_over_the_cap_is_413(served: tuple[FakeServer, httpx.Client], declared: bool) -> None:
    _, client = served
    body = b'{"messages": "' + b"x" * (CAP + 1000) + b'"}'
    content = body if declared else iter([body[: CAP // 2], body[CAP // 2 :]])
    response = client.post(CHAT, content=content)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


def test_body_that_declares_gigabytes_is_refused_without_waiting_for_them(
    served: tuple[FakeServer, httpx.Client],
) -> None:
    server, _ = served
    began = time.monotonic()
    assert b" 413 " in reply_to(server, post_head(CHAT, 1 << 40) + b"{}")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("length", ["-1", "1e3", "abc"])
def test_content_length_that_is_no_number_is_400(served: tuple[FakeServer, httpx.Client], length: str) -> None:
    server, _ = served
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
    assert reply_to(server, head).startswith(b"HTTP/1.1 400 ")


def test_half_sent_body_is_408_and_closed(served: tuple[FakeServer, httpx.Client]) -> None:
    server, _ = served
    reply = reply_to(server, post_head(CHAT, 100), b'{"messages"')
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"11 bytes came" in reply


def test_half_sent_body_that_is_given_up_reaches_no_engine(served: tuple[FakeServer, httpx.Client]) -> None:
    server, client = served
    before = client.get("/metrics").text.count('status="499"')
    with raw_connection(server) as raw:
        raw.sendall(post_head(CHAT, 100) + b'{"messages"')
    if before == 0:
        eventually(lambda: 'status="499"' in client.get("/metrics").text)


def test_half_sent_header_is_closed(served: tuple[FakeServer, httpx.Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "header_timeout_s", 0.2)
    server, _ = served
    with raw_connection(server) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        began = time.monotonic()
        for _ in range(100):
            # One byte now and then must not buy more time.
            time.sleep(0.02)
            try:
                raw.sendall(b"X")
            except OSError:
                break
        else:
            pytest.fail("the connection stayed open")
        assert time.monotonic() - began < 2


def test_connection_that_never_says_a_word_is_closed(
    served: tuple[FakeServer, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "header_timeout_s", 0.1)
    server, _ = served
    with raw_connection(server) as raw:
        try:
            assert raw.recv(1) == b""
        except ConnectionResetError:
            pass


def test_header_timeout_does_not_hit_a_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "header_timeout_s", 0.1)
    with serving(FakeEngine("x" * 60, step_s=0.005)) as (_, client):
        for stream in (True, False):
            assert client.post(CHAT, json=hello(stream=stream)).status_code == 200


def test_disconnect_right_after_connecting_or_sending_is_harmless(served: tuple[FakeServer, httpx.Client]) -> None:
    server, _ = served
    body = json.dumps(hello(stream=True)).encode()
    whole = post_head(CHAT, len(body)) + body
    for cut in (0, 1, 20, len(whole) - len(body), len(whole) - 1, len(whole)):
        with raw_connection(server) as raw:
            raw.sendall(whole[:cut])
            # RST instead of FIN: the client vanished.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


def test_pipelined_requests_are_answered_in_order(served: tuple[FakeServer, httpx.Client]) -> None:
    server, _ = served
    bodies = [json.dumps(hello(max_tokens=count)).encode() for count in (1, 2, 3)]
    closing = post_head(CHAT, len(bodies[2]), "Connection: close") + bodies[2]
    pieces = [post_head(CHAT, len(body)) + body for body in bodies[:2]]
    reply = reply_to(server, b"".join(pieces) + closing)
    counts = [reply.index(b'"completion_tokens":%d,' % count) for count in (1, 2, 3)]
    assert counts == sorted(counts)


def test_garbage_bytes_get_400_or_nothing(served: tuple[FakeServer, httpx.Client]) -> None:
    server, _ = served
    noise = random.Random(0)
    for size in (1, 10, 1000, 20_000):
        garbage = noise.randbytes(size) + b"\r\n\r\n"
        try:
            reply = reply_to(server, garbage)
        except ConnectionResetError:
            continue
        assert reply == b"" or reply.startswith(b"HTTP/1.1 400 ")


def test_header_without_end_is_refused(served: tuple[FakeServer, httpx.Client]) -> None:
    server, _ = served
    try:
        reply = reply_to(server, b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000)
    except (ConnectionResetError, BrokenPipeError):
        return
    assert reply.startswith(b"HTTP/1.1 400 ")


def test_random_json_is_answered_with_a_client_error(served: tuple[FakeServer, httpx.Client]) -> None:
    _, client = served
    chance = random.Random(1)

    def value(depth: int) -> object:
        kinds = [None, True, -1, 0.5, 10**25, "", "text", "\x00", [], {}]
        if depth and chance.random() < 0.5:
            if chance.random() < 0.5:
                return [value(depth - 1) for _ in range(chance.randrange(3))]
            return {chance.choice(names): value(depth - 1) for _ in range(chance.randrange(4))}
        return chance.choice(kinds)

    names = ["model", "messages", "role", "content", "type", "text", "stream", "n", "stop", "seed", "logit_bias"]
    for _ in range(300):
        body = {name: value(4) for name in chance.sample(names, 6)}
        response = client.post(CHAT, json=body)
        # 408: this machine was too slow to send the body within the 0.4 s of this server.
        assert response.status_code in (400, 404, 408), (body, response.text)
        error_of(response)


def test_ten_megabyte_prompt_is_counted_and_refused_while_others_stream() -> None:
    engine = FakeEngine(FakeAnswer(text="x" * 400), step_s=0.002, context_tokens=4096)
    model = byte_model(engine, prompts=BytePrompts(context_tokens=4096))
    big = json.dumps(hello()).replace("hi", "y" * 10_000_000).encode()
    with (
        FakeServer([model]) as server,
        httpx.Client(base_url=server.url, verify=False, timeout=20) as client,
        client.stream("POST", CHAT, json=hello(stream=True)) as running,
    ):
        lines = running.iter_lines()
        next(lines)
        refused = client.post(CHAT, content=big)
        rest = "\n".join(lines)
    assert refused.status_code == 400
    assert "10000018 tokens" in error_of(refused)["message"]
    assert rest.rstrip().endswith("[DONE]")


def test_bodies_that_arrive_together_are_bounded_in_memory() -> None:
    """Six half-sent bodies of nearly the cap would be six caps of memory; the server holds four."""
    cap = 1 << 20
    with serving(FakeEngine("x"), max_body_bytes=cap) as (server, _):
        head, most = post_head(CHAT, cap), b"x" * (cap - 10)
        replies = []
        sockets = []
        for _ in range(6):
            raw = socket.create_connection(server.address, timeout=5)
            raw.sendall(head + most)
            sockets.append(raw)
        for raw in sockets:
            raw.settimeout(0.3)
            try:
                replies.append(raw.recv(20))
            except TimeoutError:
                replies.append(b"")
            raw.close()
    assert sum(reply.startswith(b"HTTP/1.1 429") for reply in replies) == 2
    assert replies.count(b"") == 4
