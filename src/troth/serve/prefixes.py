"""Prefixes computed before anybody asks, and pinned: /v1/cache/prefixes, and what ``troth serve --warm`` reads.

Refuses to know how a pin is kept (``schedule/pins.py``). A prefix is an ordinary request of one token that carries a
pin. Read next: ``model.py``, ``contracts/request.py``.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from troth.contracts.capabilities import TemplateCapabilities
from troth.contracts.events import Completed, Failed
from troth.contracts.names import RequestId
from troth.contracts.ports import EngineStatus
from troth.contracts.prefix_cache import PinnedPrefix
from troth.contracts.request import Request
from troth.errors import ContextExceeded, RequestError, StreamProtocol
from troth.serve.body import BodyReader
from troth.serve.errors import EngineFailure, HttpError
from troth.serve.fields import Fields, decode_object, missing
from troth.serve.limits import StreamLimit
from troth.serve.messages import read_messages
from troth.serve.model import ModelList, Prompts, ServedModel
from troth.serve.terms import read_terms
from troth.text.prefix import PrefixIds, chat_prefix

_SHOWN: Final = 80
"""Characters of an unknown id that an error repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prefix that is to be computed and pinned."""

    model: ServedModel
    request: Request

    @property
    def name(self) -> str:
        """Of the pin."""
        return self.request.pin or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """What became of it."""

    num_prompt_tokens: int
    num_cached_tokens: int
    prefill_s: float


class PrefixRoutes:
    """Handlers of the prefix routes."""

    def __init__(self, models: ModelList, bodies: BodyReader, limit: StreamLimit) -> None:
        self._models = models
        self._bodies = bodies
        self._limit = limit

    async def add(self, request: HttpRequest) -> Response:
        """Compute and pin one; what is pinned."""
        body = await self._bodies.read(request.scope, request.receive)
        with self._limit.running():
            prefix = await asyncio.to_thread(lambda: read_prefix(Fields(decode_object(body)), self._models))
            warmed = await warm(prefix)
        removed = PinnedPrefix(name=prefix.name, num_tokens=0, num_bytes=0)  # by somebody else, meanwhile
        pinned = next((pin for pin in await _pins(prefix.model) if pin.name == prefix.name), removed)
        usage = {"prompt_tokens": warmed.num_prompt_tokens, "cached_tokens": warmed.num_cached_tokens}
        return _json({**_object(prefix.model, pinned), **usage})

    async def all(self, request: HttpRequest) -> Response:
        """Every pinned prefix of every model."""
        found = [_object(model, pin) for model in self._models for pin in await _pins(model)]
        return _json({"object": "list", "data": found})

    async def remove(self, request: HttpRequest) -> Response:
        """Unpin one by its id, in every model that has it."""
        name = request.path_params["prefix_id"]
        holding = [model for model in self._models if any(pin.name == name for pin in await _pins(model))]
        if not holding:
            message = f"no prefix {name[:_SHOWN]!r} is pinned; GET /v1/cache/prefixes lists those that are"
            raise HttpError(404, message, code="prefix_not_found")
        for model in holding:
            model.client.unpin(name)
        return _json({"id": name, "object": "prefix", "deleted": True})


def read_prefix(fields: Fields, models: ModelList) -> Prefix:
    """Read one: ``messages`` as a chat has them, or ``prompt`` as a text; ``id`` names it, else what is in it does.

    Raises:
        RequestError: a field is wrong, the model's template refuses the messages, or there is nothing to pin.
        ContextExceeded, UnknownModel, NotReady: as for any request.
    """
    model = models.find(fields.text("model"))
    info = model.client.info
    name = fields.text("id")
    found = prefix_ids(fields, model.prompts, model.capabilities)
    num_tokens = len(found.ids)
    if num_tokens >= info.context_tokens:
        param = "messages" if fields.raw("prompt") is None else "prompt"
        raise ContextExceeded(num_prompt_tokens=num_tokens, max_tokens=1, limit=info.context_tokens, param=param)
    return Prefix(model=model, request=found.request(RequestId(f"warm-{secrets.token_hex(12)}"), name))


async def warm(prefix: Prefix) -> Warmed:
    """Compute a prefix, which pins it. Raises EngineFailure: what ended it; nothing is pinned then."""
    async for event in prefix.model.client.submit(prefix.request):
        if isinstance(event, Failed):
            raise EngineFailure(event)
        if isinstance(event, Completed):
            usage = event.usage
            return Warmed(
                num_prompt_tokens=usage.num_prompt_tokens,
                num_cached_tokens=usage.num_cached_tokens,
                prefill_s=event.timings.prefill_s,
            )
    raise StreamProtocol("the engine's stream stopped without an end")


def prefix_ids(fields: Fields, prompts: Prompts, capabilities: TemplateCapabilities) -> PrefixIds:
    """The tokens of ``prompt``, or those that every conversation begins with that goes on from ``messages``.

    Raises:
        RequestError: a field is wrong or unknown, the template refuses the messages, or they have nothing in common.
    """
    text = fields.text("prompt")
    if text is None and fields.raw("messages") is None:
        raise missing("messages")
    if text is not None and fields.raw("messages") is not None:
        raise RequestError("a prefix is made of prompt or of messages, not of both", param="prompt")
    if text is not None:
        found = PrefixIds(tuple(prompts.completion(text).ids))
    else:
        found = _chat_ids(fields, prompts, capabilities)
    unknown = fields.unknown()
    if unknown:
        raise RequestError(f"{unknown[0]!r} is no field of a prefix; leave it out", param=unknown[0])
    return found


def _chat_ids(fields: Fields, prompts: Prompts, capabilities: TemplateCapabilities) -> PrefixIds:
    messages, _ = read_messages(fields)
    terms, variables = read_terms(fields), fields.object("chat_template_kwargs")
    terms.require_served(capabilities)
    asked = terms.variables(capabilities) | dict(variables.items() if variables else ())
    return chat_prefix(prompts, messages, terms.shown_tools, asked or None)


async def _pins(model: ServedModel) -> tuple[PinnedPrefix, ...]:
    status: EngineStatus = await model.client.status()
    return () if status.prefix_cache is None else status.prefix_cache.pins


def _object(model: ServedModel, pin: PinnedPrefix) -> dict[str, Any]:
    return {"id": pin.name, "object": "prefix", "model": model.name, "tokens": pin.num_tokens, "bytes": pin.num_bytes}


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
