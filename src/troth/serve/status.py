"""GET routes that describe the server: landing page, health, models, status, metrics.

Refuses to know generation. Read next: ``app.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from troth.contracts.ports import EngineStatus
from troth.errors import TrothError
from troth.serve.errors import error_object
from troth.serve.limits import StreamLimit
from troth.serve.metrics import CONTENT_TYPE, Metrics
from troth.serve.model import ModelList, ServedModel

_RETRY: Final = {"retry-after": "2"}
_WORST_FIRST: Final = ("failed", "unresponsive")


class StatusRoutes:
    """Handlers of the descriptive routes."""

    def __init__(self, models: ModelList, limit: StreamLimit, metrics: Metrics) -> None:
        self._models = models
        self._limit = limit
        self._metrics = metrics
        self._started = time.monotonic()

    async def landing(self, request: Request) -> Response:
        """What this is, for people who open it in a browser."""
        names = ", ".join(model.name for model in self._models) or "no model"
        return PlainTextResponse(
            f"Troth serves {names}.\n"
            "OpenAI API: /v1/chat/completions, /v1/completions, /v1/models\n"
            "Running answers: /v1/requests/ID/end-reasoning\n"
            "Pinned prefixes: /v1/cache/prefixes\n"
            "Tokenizer: /tokenize, /detokenize\n"
            "State: /health, /v1/status, /metrics\n"
        )

    async def health(self, request: Request) -> Response:
        """200 when every engine takes requests, else 503 with the state of each."""
        models = list(self._models)
        states = dict(zip((model.name for model in models), await asyncio.gather(*map(_state, models)), strict=True))
        if all(state == "ready" for state in states.values()):
            return _json({"status": "ok"})
        worst = next((state for state in _WORST_FIRST if state in states.values()), "loading")
        return _json({"status": worst, "models": states}, 503, _RETRY)

    async def models(self, request: Request) -> Response:
        """Every model."""
        return _json({"object": "list", "data": [_model_object(model) for model in self._models]})

    async def model(self, request: Request) -> Response:
        """One model by name or alias; names may contain slashes."""
        return _json(_model_object(self._models.find(request.path_params["model"])))

    async def status(self, request: Request) -> Response:
        """Engines with their memory plan and what they are doing."""
        engines = [
            {"model": model.name, **_info(model, _state_of(status)), "status": status, "objects": _objects(model)}
            for model, status in zip(self._models, await self._statuses(), strict=True)
        ]
        return _json(
            {
                "uptime_s": round(time.monotonic() - self._started, 3),
                "generations_running": self._limit.num_running,
                "engines": engines,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus."""
        statuses = zip((model.name for model in self._models), await self._statuses(), strict=True)
        known = [(name, status) for name, status in statuses if isinstance(status, EngineStatus)]
        body = self._metrics.render(known, self._limit.num_running)
        return Response(body, media_type=CONTENT_TYPE)

    async def _statuses(self) -> list[EngineStatus | dict[str, Any]]:
        return await asyncio.gather(*(_status(model) for model in self._models))


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def _state(model: ServedModel) -> str:
    """ready, or what the engine says of itself; an engine that takes requests is not asked, it may be busy."""
    try:
        _ = model.client.info
    except TrothError:
        return _state_of(await _status(model))
    return "ready"


def _state_of(status: EngineStatus | dict[str, Any]) -> str:
    return status.state if isinstance(status, EngineStatus) else str(status["state"])


def _info(model: ServedModel, state: str) -> dict[str, Any]:
    try:
        info = model.client.info
    except TrothError as error:
        return {"state": state, "info": None, **error_object(error)}
    plan = info.plan
    totals = {"kv_bytes": plan.kv_bytes, "total_bytes": plan.total_bytes, "fits": plan.fits}
    totals["prompt_cache_bytes"] = plan.prompt_cache_bytes
    return {"state": "ready", "info": {**dataclasses.asdict(info), "plan": dataclasses.asdict(plan) | totals}}


def _objects(model: ServedModel) -> dict[str, Any]:
    return {name: dataclasses.asdict(status()) for name, status in model.objects.items()}


async def _status(model: ServedModel) -> EngineStatus | dict[str, Any]:
    try:
        return await model.client.status()
    except TrothError as error:
        return {"state": "unresponsive", **error_object(error)}


def _model_object(model: ServedModel) -> dict[str, Any]:
    value = {"id": model.name, "object": "model", "created": model.created, "owned_by": "troth"}
    try:
        context_tokens = model.client.info.context_tokens
    except TrothError:
        # Still loading: known to be served, its context not yet.
        return value
    return {**value, "context_length": context_tokens, "max_model_len": context_tokens}
