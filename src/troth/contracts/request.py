"""A request as the scheduler and the runner see it: token ids, limits and sampling. No text, no template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from troth.contracts.answer import AnswerReading
from troth.contracts.bounds import INT64, mistyped, require_flag, require_integer
from troth.contracts.grammar import Grammar
from troth.contracts.names import RequestId
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import Speculation
from troth.errors import RequestError

MAX_PIN_CHARACTERS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, immutable from admission to its end.

    Built from a prompt of ``text/prompt.py``; whether it fits is for ``schedule/admission.py`` to say.

    Raises:
        RequestError: a value that no engine could use; ``param`` names it. Prompt ids are not looked at.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    """At least one token id, each 0 <= id < vocabulary size."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    """Most tokens to emit; None becomes what the context leaves at admission."""
    eos_ids: frozenset[int] = frozenset()
    """Ids that end the answer. They are emitted (and counted) but never committed and never shown."""
    stop: tuple[str, ...] = ()
    """Stop strings, matched in visible text only, excluded from it."""
    grammar: Grammar | None = None
    """What the answer must match; None: anything."""
    reading: AnswerReading | None = None
    """How the answer is split into text, reasoning and calls; None: all of it is text."""
    continues_text: bool = False
    """Whether the answer goes on in the middle of a text: a space at its start is then part of it."""
    echo_special: bool = False
    """Whether the text of special tokens stays in the answer."""
    boundary: int | None = None
    """Conversation boundary: prompt tokens before the generation prompt. A checkpoint is worth taking there."""
    checkpoint_positions: tuple[int, ...] = ()
    """Further prompt positions where a checkpoint is worth taking (end of system and tools), ascending."""
    namespace: str = ""
    """Salt of the prompt cache; requests with different namespaces never share blocks."""
    prompt_cache: bool = True
    """False: neither read nor written by this request."""
    pin: str | None = None
    """Name under which the prompt stays in the prompt cache from its first token on, until it is unpinned."""
    speculation: Speculation | None = None
    """How drafts are made for it; None: as the engine does. No answer depends on it."""
    priority: int = 0
    """Lower runs first; equal priorities run in order of arrival."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            require_integer("max_tokens", self.max_tokens, 1, INT64)
        require_integer("priority", self.priority, -INT64, INT64)
        for name in ("continues_text", "echo_special", "prompt_cache"):
            require_flag(name, getattr(self, name))
        _require_stops(self.stop)
        if not isinstance(self.namespace, str):
            raise mistyped("cache_salt", "a string", self.namespace)
        _require_pin(self.pin, self.prompt_cache)
        if not isinstance(self.grammar, Grammar | None):
            raise mistyped("grammar", "a Grammar or None", self.grammar)
        if not isinstance(self.speculation, Speculation | None):
            raise mistyped("speculation", "a Speculation or None", self.speculation)
        if not isinstance(self.reading, AnswerReading | None):
            raise mistyped("reading", "an AnswerReading or None", self.reading)

    @property
    def num_forced_tokens(self) -> int:
        """Most tokens that may be emitted on top of ``max_tokens``."""
        return 0 if self.reading is None else self.reading.num_forced_tokens


def _require_pin(pin: object, prompt_cache: bool) -> None:
    if pin is None:
        return
    if not isinstance(pin, str):
        raise mistyped("pin", "a string or None", pin)
    if not 1 <= len(pin) <= MAX_PIN_CHARACTERS or not pin.isprintable():
        raise RequestError(
            f"pin must have 1 to {MAX_PIN_CHARACTERS} printable characters, not {pin[:MAX_PIN_CHARACTERS]!r}",
            param="pin",
        )
    if not prompt_cache:
        raise RequestError("a prompt is pinned in the prompt cache; leave prompt_cache on, or pin out", param="pin")


def _require_stops(stops: object) -> None:
    if not isinstance(stops, tuple) or not all(isinstance(stop, str) for stop in stops):
        raise mistyped("stop", "a string or a list of strings", stops)
    if "" in stops:
        raise RequestError("a stop string must not be empty; leave it out instead", param="stop")
