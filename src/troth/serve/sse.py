"""The way back to one client: a stream of server-sent events, or one JSON body.

Refuses to know what the records say. Read next: ``generation.py``, its user; ``connection.py``, its short way out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.types import Scope, Send

from troth.contracts.ports import Clock
from troth.serve.connection import CONNECTION, Connection

STALL_S: Final = 30.0
"""A client that takes nothing for this long is dropped."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of the nginx family would collect records otherwise
)


class EventSink:
    """The client's end of one streamed answer.

    Args:
        scope, send: of the ASGI request.
        clock: monotonic seconds.
    """

    stall_s = STALL_S

    def __init__(self, scope: Scope, send: Send, clock: Clock = time.monotonic) -> None:
        self.begun = False
        """Whether the status line is out: from then on errors are records."""
        self._send = send
        self._clock = clock
        self._connection: Connection | None = scope.get("state", {}).get(CONNECTION)
        self._last_write = clock()
        self._writing = 0

    def silence_left_s(self, keepalive_s: float) -> float:
        """Seconds until a keep-alive may be due, more than 0 and at most ``keepalive_s``."""
        left_s = keepalive_s - self._idle_s
        return left_s if left_s > 0 else keepalive_s

    @property
    def is_stalled(self) -> bool:
        """Whether a write has been waiting for too long."""
        return self._writing > 0 and self._idle_s >= self.stall_s

    def is_silent(self, keepalive_s: float) -> bool:
        """Whether nothing was sent for so long, and everything sent before has left."""
        congested = self._connection is not None and self._connection.is_congested
        return not self._writing and not congested and self._idle_s >= keepalive_s

    async def begin(self, records: bytes) -> None:
        """Send status 200 and the first records."""
        assert not self.begun, "a response begins once"
        with self._write_under_way():
            await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        self.begun = True
        if records:
            await self.write(records)

    async def write(self, records: bytes) -> None:
        """Send whole records; waits while the client does not keep up."""
        with self._write_under_way():
            if self._connection is not None:
                await self._connection.write(records)
            else:
                await self._send({"type": "http.response.body", "body": records, "more_body": True})

    async def keep_alive(self, keepalive_s: float) -> None:
        """Send a comment if a begun stream is silent."""
        if self.begun and self.is_silent(keepalive_s):
            await self.write(KEEP_ALIVE)

    async def end(self, records: bytes) -> None:
        """Send the last records and end the response."""
        with self._write_under_way():
            await self._send({"type": "http.response.body", "body": records, "more_body": False})

    async def fail(self, records: bytes) -> None:
        """As ``end``, for a client that may not be reading: it is dropped when it takes too long."""
        try:
            async with asyncio.timeout(self.stall_s):
                await self.end(records)
        except TimeoutError:
            self.abort()

    async def whole(self, body: bytes) -> None:
        """Send a JSON reply instead of a stream."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        with self._write_under_way():
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.begun = True
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def abort(self) -> None:
        """Drop the client."""
        if self._connection is not None:
            self._connection.abort()

    @contextmanager
    def _write_under_way(self) -> Iterator[None]:
        self._last_write = self._clock()
        self._writing += 1
        try:
            yield
        finally:
            self._writing -= 1

    @property
    def _idle_s(self) -> float:
        return self._clock() - self._last_write
