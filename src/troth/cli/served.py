"""One model as the HTTP server knows it: the engine in a process of its own, the text side in the server's.

Refuses to know sockets and signals. Read next: ``serve.py``, ``runtime/isolate.py``, ``serve/model.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from troth.compose import TextSide
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.ports import EngineClient
from troth.runtime.isolate import ProcessEngineClient, RestartPolicy
from troth.serve.model import Prompt, Prompts, ServedModel

FACTORY: Final = "troth.compose:build_engine"


def engine_client(name: str, model: ModelOptions, engine: EngineOptions) -> ProcessEngineClient:
    """The engine's handle; its process starts with ``start``, and again after a crash."""
    options = {"model": dataclasses.asdict(model), "engine": dataclasses.asdict(engine)}
    return ProcessEngineClient(FACTORY, options, name=name, restart=RestartPolicy())


def served_model(name: str, client: EngineClient, text: TextSide) -> ServedModel:
    """The model as the server's routes see it."""
    grammars = text.grammars(text.tokenizer.vocab_size)
    return ServedModel(
        name=name,
        client=client,
        prompts=LatePrompts(text, client),
        tokenizer=text.tokenizer,
        capabilities=text.capabilities,
        calls=text.calls,
        defaults=text.defaults.sampling(),
        grammars=grammars,
        objects={"token_beginnings": text.beginnings.status, "grammars": grammars.status},
    )


class LatePrompts:
    """Builds prompts for an engine whose context is known once it has loaded; until then it raises NotReady."""

    def __init__(self, text: TextSide, client: EngineClient) -> None:
        self._text = text
        self._client = client
        self._builder: Prompts | None = None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> Prompt:
        """As serve.model.Prompts."""
        return self._ready().chat(messages, tools, variables, continue_final)

    def completion(self, text: str) -> Prompt:
        """As serve.model.Prompts."""
        return self._ready().completion(text)

    def token_ids(self, ids: Sequence[int]) -> Prompt:
        """As serve.model.Prompts."""
        return self._ready().token_ids(ids)

    def _ready(self) -> Prompts:
        if self._builder is None:
            self._builder = self._text.prompts(self._client.info.context_tokens)
        return self._builder
