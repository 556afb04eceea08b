"""What the server tests share: a server over a fake engine, and a reader of event streams."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from troth.config.options import ServeOptions
from troth.serve.app import create_app
from troth.serve.model import ServedModel
from troth.testing.fake_engine import FakeEngine
from troth.testing.fake_server import FakeServer, byte_model

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


Result = TypeVar("Result")


def hello(**fields: Any) -> dict[str, Any]:
    """A small chat body."""
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


@contextmanager
def serving(engine: FakeEngine | None = None, **options: Any) -> Iterator[tuple[FakeServer, httpx.Client]]:
    """A running server and a client of it."""
    app = {name: options.pop(name) for name in ("body_timeout_s",) if name in options}
    server = FakeServer(engine, ServeOptions(**{"port": 0, **options}), **app)
    with server, httpx.Client(base_url=server.url, timeout=20, verify=False) as client:
        yield server, client


class Asked:
    """A client of the application without a socket: each call runs until the whole reply is there."""

    def __init__(self, runner: asyncio.Runner, http: httpx.AsyncClient) -> None:
        self._runner = runner
        self.http = http

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the application's event loop."""
        return self._runner.run(work)

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        """GET."""
        return self._runner.run(self.http.get(path, **arguments))

    def post(self, path: str, **arguments: Any) -> httpx.Response:
        """POST."""
        return self._runner.run(self.http.post(path, **arguments))


@contextmanager
def asking(engine: FakeEngine | list[ServedModel] | None = None, **options: Any) -> Iterator[Asked]:
    """A client of the application over an engine or models; for all that does not depend on sockets and timing."""
    models = engine if isinstance(engine, list) else [byte_model(engine or FakeEngine())]
    app = create_app(models, ServeOptions(**options))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    with asyncio.Runner() as runner:
        http = httpx.AsyncClient(transport=transport, base_url="http://troth.test")
        yield Asked(runner, http)
        runner.run(http.aclose())


def records(text: str) -> list[dict[str, Any]]:
    """The data objects of an event stream that must end with [DONE]."""
    *data, done = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(line) for line in data]


def streamed_text(objects: Iterable[dict[str, Any]], choice: int = 0, field: str = "content") -> str:
    """The text of one choice of a chat stream."""
    return "".join(
        one["delta"].get(field) or "" for value in objects for one in value["choices"] if one["index"] == choice
    )


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of a refused request."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that happens in another thread."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@contextmanager
def raw_connection(server: FakeServer) -> Iterator[socket.socket]:
    """A plain socket to the server, for requests no client library would send."""
    with socket.socket() as raw:
        raw.settimeout(20)
        raw.connect(server.address)
        yield raw


def post_head(path: str, length: int, *headers: str) -> bytes:
    """The header of a POST with a body of ``length`` bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()
