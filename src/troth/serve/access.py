"""Who may speak to the server: keys, and pages of other sites.

Refuses to know routes beyond the one that is open. Read next: ``app.py``.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from troth.serve.errors import HttpError, error_response

_OPEN_PATHS: Final = ("/health",)


class Access:
    """ASGI middleware that lets through who has a key, and no browser page that was not invited.

    Args:
        app: what is protected.
        api_keys: accepted keys; none: everybody may enter.
        cors_origins: origins of pages that may post.
    """

    def __init__(self, app: ASGIApp, api_keys: Collection[str], cors_origins: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._origins = frozenset(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, then pass on."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = None
            if scope["path"] not in _OPEN_PATHS and not self._knows(headers):
                refusal = HttpError(
                    401,
                    "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            elif self._is_foreign_post(scope, headers):
                refusal = HttpError(
                    403,
                    "a page of another site may not post here without content-type: application/json; "
                    "allow its origin in the server's CORS origins",
                    code="foreign_origin",
                )
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        if not self._keys:
            return True
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Every key is compared, so that the time tells nothing about which one came near. Headers are latin-1.
        return sum(hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys) > 0

    def _is_foreign_post(self, scope: Scope, headers: Headers) -> bool:
        """Whether a browser sent this for another site without asking first (a CORS preflight needs JSON)."""
        origin = headers.get("origin")
        if scope["method"] != "POST" or origin is None or origin in self._origins or "*" in self._origins:
            return False
        host = headers.get("host")
        if host is not None and _host_of(origin) == host:
            return False
        return headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"


def _host_of(origin: str) -> str | None:
    """Host and port of an origin; None when there are none to be made out."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
