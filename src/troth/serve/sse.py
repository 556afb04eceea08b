"""A server-sent-event response: when it has begun, what was sent last, how it ends.

Refuses to know what the records say. Read next: ``generation.py``, its user; ``connection.py``, its short way out.
"""

from __future__ import annotations

import time
from typing import Final

from starlette.types import Scope, Send

from troth.contracts.ports import Clock
from troth.serve.connection import CONNECTION, Connection

STALL_S: Final = 30.0
"""A client that takes nothing for this long is dropped."""
KEEP_ALIVE: Final = b": keep-alive\n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies of the nginx family would collect records otherwise
]


class EventSink:
    """The client's end of one streamed answer.

    Args:
        scope, send: of the ASGI request.
        clock: monotonic seconds.
    """

    def __init__(self, scope: Scope, send: Send, clock: Clock = time.monotonic) -> None:
        self.begun = False
        """Whether the status line is out: from then on errors are records."""
        self._send = send
        self._clock = clock
        self._connection: Connection | None = scope.get("state", {}).get(CONNECTION)
        self._last_write = clock()
        self._writing = 0

    @property
    def idle_s(self) -> float:
        """Seconds since the last write began."""
        return self._clock() - self._last_write

    @property
    def is_stalled(self) -> bool:
        """Whether a write waits for a client that takes nothing."""
        return self._writing > 0 and self.idle_s >= STALL_S

    async def begin(self, records: bytes) -> None:
        """Send status 200 and the first records."""
        assert not self.begun, "a response begins once"
        self.begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if records:
            await self.write(records)

    async def write(self, records: bytes) -> None:
        """Send whole records; waits while the client does not keep up."""
        self._last_write = self._clock()
        self._writing += 1
        try:
            if self._connection is not None:
                await self._connection.write(records)
            else:
                await self._send({"type": "http.response.body", "body": records, "more_body": True})
        finally:
            self._writing -= 1

    async def keep_alive(self) -> None:
        """Send a comment, unless a write is under way already."""
        if self.begun and not self._writing:
            await self.write(KEEP_ALIVE)

    async def end(self, records: bytes) -> None:
        """Send the last records and end the response."""
        await self._send({"type": "http.response.body", "body": records, "more_body": False})

    def abort(self) -> None:
        """Drop the client."""
        if self._connection is not None:
            self._connection.abort()
