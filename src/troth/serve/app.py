"""The ASGI application: routes, and what surrounds every request.

Refuses to know engines and tokenizers beyond ``model.py``. Read next: ``generation.py``, ``openai_chat.py``,
``listen.py``.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from troth.config.options import ServeOptions
from troth.errors import TrothError
from troth.serve.access import Access
from troth.serve.body import BODY_TIMEOUT_S, CLIENT_GONE, BodyReader
from troth.serve.errors import HttpError, error_response, internal_error
from troth.serve.generation import GenerationEndpoint
from troth.serve.limits import StreamLimit
from troth.serve.metrics import Metrics
from troth.serve.model import ModelList, ServedModel
from troth.serve.openai_chat import read_chat
from troth.serve.openai_completions import read_completion
from troth.serve.prefixes import PrefixRoutes
from troth.serve.running import RunningRequests
from troth.serve.status import StatusRoutes
from troth.serve.tokens import TokenRoutes

_log = logging.getLogger(__name__)
_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")


def create_app(
    models: Iterable[ServedModel], options: ServeOptions, *, body_timeout_s: float = BODY_TIMEOUT_S
) -> ASGIApp:
    """Build the application. It neither starts nor closes the engines of ``models``."""
    known = ModelList(models, options.model_aliases)
    bodies = BodyReader(options.max_body_bytes, body_timeout_s)
    limit, metrics, running = StreamLimit(options.max_streams), Metrics(), RunningRequests()
    status, tokens = StatusRoutes(known, limit, metrics), TokenRoutes(known, bodies)
    prefixes = PrefixRoutes(known, bodies, limit)
    endpoint = partial(
        GenerationEndpoint,
        bodies=bodies,
        limit=limit,
        metrics=metrics,
        running=running,
        keepalive_s=options.keepalive_s,
        timeout_s=options.request_timeout_s,
    )
    routes = [
        Route("/", status.landing),
        Route("/health", status.health),
        Route("/metrics", status.metrics),
        Route("/v1/status", status.status),
        Route("/v1/models", status.models),
        Route("/v1/models/{model:path}", status.model),
        Route("/v1/chat/completions", endpoint(partial(read_chat, models=known)), methods=["POST"]),
        Route("/v1/completions", endpoint(partial(read_completion, models=known)), methods=["POST"]),
        Route("/v1/requests/{request_id:path}/end-reasoning", running.end_reasoning, methods=["POST"]),
        Route("/v1/cache/prefixes", prefixes.all),
        Route("/v1/cache/prefixes", prefixes.add, methods=["POST"]),
        Route("/v1/cache/prefixes/{prefix_id:path}", prefixes.remove, methods=["DELETE"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
    ]
    app: ASGIApp = Starlette(
        routes=routes,
        exception_handlers={TrothError: _on_error, HTTPException: _on_http_exception, Exception: _on_bug},
    )
    app = Access(app, options.api_keys, options.cors_origins)
    if options.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return _Edge(app, metrics)


class _Edge:
    """Outermost: names every request and counts every response."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, complete = CLIENT_GONE, False
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def named_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except Exception:
            # Starlette raises a bug again after _on_bug has answered it; the server need not hear of it twice.
            if not complete:
                raise
        finally:
            route = scope.get("route")
            self._metrics.responded(route.path if isinstance(route, Route) else "none", status)


async def _on_bug(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(internal_error())


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TrothError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        refusal = HttpError(
            404, f"there is no {request.url.path}; the landing page / lists what there is", code="not_found"
        )
    elif error.status_code == 405:
        headers = dict(error.headers or {})
        message = f"{request.method} is not served at {request.url.path}; use {headers.get('Allow', 'another method')}"
        refusal = HttpError(405, message, code="method_not_allowed", headers=headers)
    else:
        refusal = HttpError(error.status_code, error.detail, code="http_error")
    return error_response(refusal)
