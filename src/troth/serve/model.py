"""What the server needs to know about one model: an engine handle, how prompts are built, and generation defaults.

Refuses to know how any of them is made; ``text/`` and ``compose.py`` provide the real ones, ``testing/`` the fakes.
Read next: ``openai_chat.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from troth.contracts.capabilities import TemplateCapabilities
from troth.contracts.grammar import Grammar
from troth.contracts.object_cache import ObjectCacheStatus
from troth.contracts.ports import EngineClient
from troth.contracts.sampling import SamplingParams
from troth.errors import RequestError, UnknownModel
from troth.text.call_pattern import CallPattern

_SHOWN: Final = 80
"""Characters of an unknown model's name that an error repeats."""


class Prompt(Protocol):
    """A prompt ready for an engine."""

    @property
    def text(self) -> str:
        """What was tokenised; empty for a prompt given as ids."""

    @property
    def ids(self) -> Sequence[int]:
        """Token ids."""

    @property
    def boundary(self) -> int | None:
        """Tokens before the generation prompt."""

    @property
    def checkpoint_positions(self) -> tuple[int, ...]:
        """Numbers of tokens after which other conversations may differ."""

    @property
    def continues_text(self) -> bool:
        """Whether the answer goes on in the middle of a text."""


class Prompts(Protocol):
    """Builds prompts. Pure and safe to call from several threads: long prompts are built off the event loop.

    Every method raises RequestError, and ContextExceeded for what can never fit.
    """

    def chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> Prompt:
        """Check and render a conversation; ``continue_final`` leaves the last message open."""

    def completion(self, text: str) -> Prompt:
        """Tokenise plain text."""

    def token_ids(self, ids: Sequence[int]) -> Prompt:
        """Take token ids as they are."""


class Tokenizer(Protocol):
    """Token ids and their text."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer."""

    def decode(self, token_ids: Iterable[int], /, *, skip_special: bool = True) -> str:
        """The text of tokens, with or without that of control tokens."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes one token stands for; a control token's are its own text."""

    def is_special(self, token_id: int, /) -> bool:
        """Whether a token is a control token, which is not shown."""

    def encode(self, text: str, /, *, add_special: bool = True) -> list[int]:
        """The tokens of a text, with or without those that begin and end one."""


class CompiledGrammar(Protocol):
    """A grammar that can be followed."""

    @property
    def not_enforced(self) -> tuple[str, ...]:
        """Pointers of a schema's keywords that were left out."""


class Grammars(Protocol):
    """Compiles grammars. Safe to call from several threads; takes up to seconds."""

    def compile(self, grammar: Grammar, *, continues_text: bool = False, param: str = "grammar") -> CompiledGrammar:
        """Compile a grammar. Raises RequestError naming ``param`` when it cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under the name clients ask for."""

    name: str
    client: EngineClient
    prompts: Prompts
    tokenizer: Tokenizer
    grammars: Grammars | None = None
    """None: requests with a grammar are refused."""
    capabilities: TemplateCapabilities = field(default_factory=TemplateCapabilities)
    """What the model's template was proved to do; by default nothing."""
    calls: CallPattern | None = None
    """How the model writes calls, where a grammar can be made of it."""
    defaults: SamplingParams = field(default_factory=SamplingParams)
    """Sampling values of requests that do not say otherwise."""
    objects: Mapping[str, Callable[[], ObjectCacheStatus]] = field(default_factory=dict)
    """The object caches of the server's process that work for this model, by what they keep."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time in seconds."""


class ModelList:
    """The models of a server, by name and by alias.

    Args:
        models: the first one serves requests that name none, if it is the only one.
        aliases: (requested name, served name) pairs.
    """

    def __init__(self, models: Iterable[ServedModel], aliases: Iterable[tuple[str, str]] = ()) -> None:
        self._models = {model.name: model for model in models}
        self._aliases = dict(aliases)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """The model a request means. Raises UnknownModel, and RequestError when it must name one and does not."""
        if name is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            raise RequestError(
                f"model is required; served: {', '.join(self._models)}",
                param="model",
                code="missing_required_parameter",
            )
        model = self._models.get(self._aliases.get(name, name))
        if model is None:
            raise UnknownModel(name[:_SHOWN], tuple(self._models))
        return model
