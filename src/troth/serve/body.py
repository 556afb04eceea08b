"""Reads request bodies within bounds of size, time and memory.

Refuses to know what is in them. Read next: ``fields.py``.
"""

from __future__ import annotations

import asyncio
from typing import Final, NoReturn

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from troth.errors import Busy
from troth.serve.errors import HttpError

BODY_TIMEOUT_S: Final = 120.0
CLIENT_GONE: Final = 499
"""Stands for the status of such a request in the metrics."""
_DISCARD_S: Final = 2.0
_HELD_BODIES: Final = 4
"""Bodies of the largest size that may lie in memory at once, over all requests."""


class ClientGone(HttpError):
    """The client closed the connection; whatever is answered, nobody reads it."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client closed the connection", code="client_gone")


class BodyReader:
    """Reads bodies for all requests of a server.

    Args:
        max_bytes: largest body.
        timeout_s: longest time a body may take to arrive.
    """

    def __init__(self, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._held_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            HttpError: 413 too large, 408 too slow, 415 compressed, 400 a length that is none.
            Busy: too many large bodies are arriving at once.
            ClientGone: the client closed the connection.
        """
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "0")
        if not (declared.isascii() and declared.isdigit()):
            raise HttpError(400, f"content-length must be a number, not {declared!r}", code="invalid_header")
        if int(declared) > self._max_bytes:
            # A client that asks before it sends need only be told.
            await self._refuse(receive, more="expect" not in headers)
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(self._timeout_s):
                while more and len(body) <= self._max_bytes:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientGone
                    chunk: bytes = message.get("body", b"")
                    self._held_bytes += len(chunk)
                    body += chunk
                    more = message.get("more_body", False)
                    if self._held_bytes > _HELD_BODIES * self._max_bytes:
                        raise Busy("too many large requests are arriving at once; try again in a moment")
        except TimeoutError:
            raise HttpError(
                408,
                f"the body did not arrive within {self._timeout_s:g} s; {len(body)} bytes came",
                code="body_timeout",
                headers={"connection": "close"},
            ) from None
        finally:
            self._held_bytes -= len(body)
        if len(body) > self._max_bytes:
            await self._refuse(receive, more=more)
        if (encoding := headers.get("content-encoding", "identity")) != "identity":
            raise HttpError(
                415,
                f"content-encoding {encoding!r} is not read here; send the body as it is",
                code="unsupported_encoding",
            )
        return bytes(body)

    async def _refuse(self, receive: Receive, *, more: bool) -> NoReturn:
        """Raise 413, after reading on for a while: a client still sending would see a reset, not the answer."""
        discarded = 0
        try:
            async with asyncio.timeout(_DISCARD_S):
                while more and discarded < self._max_bytes:
                    message = await receive()
                    discarded += len(message.get("body", b""))
                    more = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            pass
        raise HttpError(
            413,
            f"the body is larger than {self._max_bytes} bytes, the limit of this server",
            code="body_too_large",
            headers={"connection": "close"},
        )
