"""Serves the application on a socket until told to stop, then ends what is under way in good order.

Refuses to know what it serves. Read next: ``connection.py``, ``app.py``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from troth.config.options import ServeOptions
from troth.contracts.ports import EngineClient
from troth.serve.connection import Connection

IDLE_TIMEOUT_S: Final = 75
"""An idle kept-alive connection is closed after this long; clients reuse theirs for about a minute."""
_LAST_S: Final = 10
"""Answers whose engine is closed already get this long to say so."""


class Server(uvicorn.Server):
    """A uvicorn server that ends answers in good order: ``await server.serve()`` runs it, ``should_exit`` stops it."""

    grace_s = 5.0
    """Answers under way get this long to end by themselves once the server is told to stop."""

    def __init__(self, config: uvicorn.Config, engines: Sequence[EngineClient]) -> None:
        super().__init__(config)
        self._engines = engines
        self._closing: asyncio.Task[None] | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for answers under way; those that outlast the grace end when their engine does."""
        timer = asyncio.get_running_loop().call_later(self.grace_s, self._close_engines)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
        await self._close_engines()

    def _close_engines(self) -> asyncio.Task[None]:
        async def close() -> None:
            await asyncio.gather(*(engine.aclose() for engine in self._engines))

        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(close())
        return self._closing


def server_for(app: ASGIApp, options: ServeOptions, engines: Sequence[EngineClient] = ()) -> Server:
    """A server that is not yet running; give ``serve`` the socket of ``bind``.

    ``engines`` are closed when it stops. Without them, answers that outlast the grace are cut off in mid-air.
    """
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=Connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        timeout_graceful_shutdown=int(Server.grace_s) + (_LAST_S if engines else 0),
    )
    return Server(config, engines)


def bind(options: ServeOptions) -> socket.socket:
    """The listening socket; port 0 takes a free one. Raises OSError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, tokens wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError:
        listener.close()
        raise
    return listener
