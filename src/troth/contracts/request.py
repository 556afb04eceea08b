"""A request as the scheduler and the runner see it: token ids, limits and sampling. No text, no template."""

from __future__ import annotations

from dataclasses import dataclass, field

from troth.contracts.names import RequestId
from troth.contracts.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, immutable from admission to its end.

    Built by ``text/prompt.py`` from a chat or a completion, checked by ``schedule/admission.py``.
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
    priority: int = 0
    """Lower runs first; equal priorities run in order of arrival."""
