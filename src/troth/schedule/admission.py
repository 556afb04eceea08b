"""Whether a request can ever be served, and how long its answer may be. Pure functions of integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS
from troth.contracts.request import Request
from troth.errors import ContextExceeded, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The fixed numbers a scheduler works with."""

    groups: tuple[AttentionSpec, ...]
    num_blocks: tuple[int, ...]
    """Blocks of each group's pool."""
    max_rows: int
    max_waiting: int
    chunk_tokens: int
    """Most prompt tokens fed beside running decodes, in one step."""
    step_tokens: int
    """Most tokens fed in one step; at least chunk_tokens + max_rows when both are to fit."""
    context_tokens: int
    prompt_cache: bool = False
    """Whether computed blocks are remembered (``prefix_index.py``)."""
    num_checkpoints: int | None = None
    """Recurrent states that can be saved; None: the model keeps none."""
    checkpoint_bytes: int = 0
    checkpoint_interval_tokens: int = 1024
    """Distance of the checkpoints that no conversation boundary asks for; a multiple of a block."""
    max_samples: int = 64
    """Most positions of one step at which tokens are drawn when drafts are among them; drafts are cut to that."""

    def __post_init__(self) -> None:
        if len(self.groups) != len(self.num_blocks):
            raise ValueError(f"{len(self.groups)} cache groups but {len(self.num_blocks)} pool sizes")
        for name in ("max_rows", "chunk_tokens", "step_tokens", "context_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        interval = self.checkpoint_interval_tokens
        if interval < BLOCK_TOKENS or interval % BLOCK_TOKENS:
            raise ValueError(f"checkpoint_interval_tokens must be a multiple of {BLOCK_TOKENS}, not {interval}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting must be at least 0, not {self.max_waiting}")
        if self.step_tokens < self.chunk_tokens:
            raise ValueError(f"step_tokens {self.step_tokens} is below chunk_tokens {self.chunk_tokens}")

    @property
    def largest_request(self) -> int:
        """Most tokens one request can have: the context, or what every pool can hold for a single row."""
        held = (
            _most_tokens(spec, pool, self.step_tokens, self.context_tokens)
            for spec, pool in zip(self.groups, self.num_blocks, strict=True)
        )
        return min((self.context_tokens, *held))


def admit(request: Request, limits: SchedulerLimits) -> int:
    """Return the most tokens the request may emit.

    Raises:
        RequestError, ContextExceeded: as ``require_room``.
    """
    limit = limits.largest_request
    require_room(request, limit)
    num_prompt = len(request.prompt_ids)
    num_closing = 0 if request.reading is None else len(request.reading.close_ids)
    return request.max_tokens or max(1, limit - num_prompt - num_closing)


def require_room(request: Request, limit: int) -> None:
    """Refuse a request that never fits into a context.

    Args:
        request: with its prompt.
        limit: most tokens of prompt and answer.

    Raises:
        RequestError: an empty prompt.
        ContextExceeded: prompt and answer can never fit; ``param`` is ``max_tokens`` when the prompt alone does.
    """
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens; send at least one", param="prompt")
    wanted = (request.max_tokens or 1) + request.num_forced_tokens
    if num_prompt + wanted > limit:
        field = "max_tokens" if num_prompt < limit else "prompt"
        raise ContextExceeded(num_prompt_tokens=num_prompt, max_tokens=wanted, limit=limit, param=field)


def blocks_at_admission(groups: Sequence[AttentionSpec], num_tokens: int, step_tokens: int) -> tuple[int, ...]:
    """Blocks each group must be able to give a row so that feeding ``num_tokens`` never waits for one half-way."""
    return tuple(spec.blocks_for(num_tokens, step_tokens) for spec in groups)


def _most_tokens(spec: AttentionSpec, pool: int, step_tokens: int, context_tokens: int) -> int:
    if spec.blocks_for(context_tokens, step_tokens) <= pool:
        return context_tokens
    return pool * BLOCK_TOKENS
