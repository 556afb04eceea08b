"""Serves the application on a socket until told to stop.

Refuses to know what it serves. Read next: ``connection.py``, ``app.py``.
"""

from __future__ import annotations

import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from troth.config.options import ServeOptions
from troth.serve.connection import Connection

IDLE_TIMEOUT_S: Final = 75
"""An idle kept-alive connection is closed after this long; clients reuse theirs for about a minute."""
GRACE_S: Final = 5
"""Answers under way get this long to end when the server is told to stop."""


def server_for(app: ASGIApp, options: ServeOptions) -> uvicorn.Server:
    """A server that is not yet running; ``await server.serve()`` runs it, ``should_exit`` ends it."""
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
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)


async def serve(app: ASGIApp, options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM. Raises OSError when the address cannot be bound."""
    with bind(options) as listener:
        await server_for(app, options).serve(sockets=[listener])


def bind(options: ServeOptions) -> socket.socket:
    """The listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError:
        listener.close()
        raise
    return listener
