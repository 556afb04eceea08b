"""The server's side of one HTTP connection: uvicorn's, with a header timeout and a short way for stream records.

Refuses to know what is streamed. Framing a record in h11 takes 9.7 us of CPU, writing it as an HTTP chunk here 0.3 us
(one core, Python 3.11), and a stream is one record per token. Read next: ``sse.py``, ``listen.py``.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

CONNECTION: Final = "troth.connection"
"""Key of the connection in the ASGI scope's state."""
HEADER_TIMEOUT_S: Final = 30.0


class Connection(H11Protocol):
    """One connection. Requests on it follow each other, so there is at most one response under way."""

    header_timeout_s = HEADER_TIMEOUT_S
    """From the first byte of a request, or the opening of the connection, to the end of its header."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first header."""
        super().connection_made(transport)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        """Stop the clock when a header is complete; start it when one has begun."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_header()
        elif self._header_timer is None and not self.transport.is_closing():
            self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._forget_header()
        super().connection_lost(exc)

    @property
    def is_congested(self) -> bool:
        """Whether much that was written has not left yet."""
        return self.flow.write_paused

    async def write(self, body: bytes) -> None:
        """Send a piece of the streamed body; waits while the client does not keep up.

        Only between the start and the end of a response without content-length, which are ordinary ASGI messages.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        if not self.transport.is_closing():
            chunked = self.scope["http_version"] == "1.1"
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if chunked else body)

    def abort(self) -> None:
        """Drop the connection and what it has not sent."""
        self.transport.abort()

    def _expect_header(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
