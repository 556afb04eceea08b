"""POST /tokenize and /detokenize: a model's tokenizer as its completions use it.

Refuses to know engines. Read next: ``model.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from troth.contracts.bounds import mistyped_json, shown_json
from troth.errors import RequestError, TrothError
from troth.serve.body import BodyReader
from troth.serve.fields import Fields, decode_object, missing
from troth.serve.messages import read_messages
from troth.serve.model import ModelList, ServedModel
from troth.serve.terms import read_terms


class TokenRoutes:
    """Handlers of the tokenizer routes."""

    def __init__(self, models: ModelList, bodies: BodyReader) -> None:
        self._models = models
        self._bodies = bodies

    async def tokenize(self, request: Request) -> Response:
        """``prompt`` (or ``messages``, as a chat has them) -> ``tokens``, ``count``, ``max_model_len``."""
        body = await self._bodies.read(request.scope, request.receive)
        return await asyncio.to_thread(self._tokenize, body)

    async def detokenize(self, request: Request) -> Response:
        """``tokens`` -> ``prompt``."""
        body = await self._bodies.read(request.scope, request.receive)
        return await asyncio.to_thread(self._detokenize, body)

    def _tokenize(self, body: bytes) -> Response:
        fields = Fields(decode_object(body))
        model = self._models.find(fields.text("model"))
        prompt = fields.text("prompt")
        if prompt is not None:
            ids = model.prompts.completion(prompt).ids
        elif fields.raw("messages") is not None:
            ids = _chat_ids(fields, model)
        else:
            raise missing("prompt")
        return _json({"tokens": list(ids), "count": len(ids), "max_model_len": _context_tokens(model)})

    def _detokenize(self, body: bytes) -> Response:
        fields = Fields(decode_object(body))
        model = self._models.find(fields.text("model"))
        ids = fields.array("tokens")
        if ids is None:
            raise missing("tokens")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise mistyped_json("tokens", "an array of token ids", token_id)
            if not 0 <= token_id < model.tokenizer.vocab_size:
                raise RequestError(
                    f"tokens has {shown_json(token_id)}; ids are 0 to {model.tokenizer.vocab_size - 1}", param="tokens"
                )
        return _json({"prompt": model.tokenizer.decode(ids, skip_special=False)})


def _chat_ids(fields: Fields, model: ServedModel) -> Sequence[int]:
    """The prompt that a chat of these fields would have: messages, tools, and what switches thinking."""
    messages, continue_final = read_messages(fields)
    terms, variables = read_terms(fields), fields.object("chat_template_kwargs")
    terms.require_served(model.capabilities)
    asked = terms.variables(model.capabilities) | dict(variables.items() if variables else ())
    prompt = model.prompts.chat(messages, terms.shown_tools, variables=asked or None, continue_final=continue_final)
    return prompt.ids


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _context_tokens(model: ServedModel) -> int | None:
    try:
        return model.client.info.context_tokens
    except TrothError:
        return None
