"""How many blocks each pool gets, and so how long a context and how many rows fit. Integers only.

Refuses to know where the needs come from (``run/planned.py``). Read next: ``contracts/cache_spec.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from troth.contracts.cache_spec import (
    AttentionSpec,
    CacheSpec,
    attention_groups,
    head_bytes,
    recurrent_bytes,
    trail_bytes,
)
from troth.contracts.counted import counted
from troth.contracts.memory_plan import GroupPlan, MemoryPlan
from troth.contracts.names import BLOCK_TOKENS
from troth.errors import OptionError

CACHE_SHARE = 0.5
"""Of what the weights leave, the most the pools take unless told otherwise."""
GPU_CACHE_SHARE = 0.9
"""The same on a GPU, whose memory nothing else needs."""
CHECKPOINT_SHARE = 0.25
"""Of the pools' bytes, the most that checkpoints of recurrent states take."""
CHECKPOINTS_PER_ROW = 4
"""System prompt, boundary, end of the answer, and one on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be held."""

    device: str
    dtype: str
    specs: tuple[CacheSpec, ...]
    weights_bytes: int
    transient_bytes: int
    reserve_bytes: int
    usable_bytes: int
    declared_context_tokens: int
    wanted_context_tokens: int | None
    max_rows: int
    step_tokens: int
    kv_memory_bytes: int | None = None
    cache_share: float = CACHE_SHARE


def plan_memory(demand: Demand) -> MemoryPlan:
    """Give every row its context if that fits into the cache's share; else share what there is, and say so.

    A plan that cannot hold one row of one block has a context of 0 tokens and does not fit.

    Raises:
        OptionError: the wanted context exceeds the declared one, or the given cache size cannot hold one row.
    """
    decisions: list[str] = []
    context = _wanted_context(demand, decisions)
    groups = attention_groups(demand.specs)
    per_state = recurrent_bytes(demand.specs)
    state_bytes = demand.max_rows * ((per_state or 0) + trail_bytes(demand.specs) + head_bytes(demand.specs))
    budget, num_checkpoints = _shares(demand, state_bytes, context, decisions)
    tokens = _cached_tokens(groups, budget, demand, context, decisions)
    if groups and tokens < context:
        context = tokens
        decisions.append(f"context {context} tokens: what the KV cache holds for one row")
    if context < BLOCK_TOKENS:
        if demand.kv_memory_bytes is not None:
            least = _bytes(groups, BLOCK_TOKENS, demand)
            raise OptionError(f"{budget} bytes of KV cache hold no row; the least that does is {least}")
        context = 0
    return MemoryPlan(
        device=demand.device,
        dtype=demand.dtype,
        weights_bytes=demand.weights_bytes,
        groups=tuple(
            GroupPlan(
                name=_name(spec),
                num_blocks=_num_blocks(spec, tokens, demand),
                bytes_per_block=spec.bytes_per_block,
            )
            for spec in groups
        ),
        state_bytes=state_bytes,
        transient_bytes=demand.transient_bytes,
        reserve_bytes=demand.reserve_bytes,
        usable_bytes=demand.usable_bytes,
        context_tokens=context,
        declared_context_tokens=demand.declared_context_tokens,
        max_rows=demand.max_rows,
        decisions=tuple(decisions),
        num_checkpoints=num_checkpoints,
        bytes_per_checkpoint=per_state or 0,
    )


def _wanted_context(demand: Demand, decisions: list[str]) -> int:
    declared, wanted = demand.declared_context_tokens, demand.wanted_context_tokens
    if wanted is None:
        return declared
    if wanted > declared:
        raise OptionError(f"context of {wanted} tokens: this model was made for {declared}; ask for at most that")
    decisions.append(f"context {wanted} tokens: as asked")
    return wanted


def _shares(demand: Demand, state_bytes: int, context: int, decisions: list[str]) -> tuple[int, int | None]:
    """Bytes for the block pools, and the number of checkpoints; None: the model has no recurrent layers."""
    fixed = demand.weights_bytes + demand.transient_bytes + demand.reserve_bytes + state_bytes
    share = int(max(0, demand.usable_bytes - fixed) * demand.cache_share)
    budget = share if demand.kv_memory_bytes is None else demand.kv_memory_bytes
    per_state = recurrent_bytes(demand.specs)
    if per_state is None:
        return budget, None
    num_checkpoints = _num_checkpoints(demand, per_state, context, min(budget, share))
    decisions.append(
        f"{counted(num_checkpoints, 'checkpoint')} of {per_state} bytes: recurrent states kept for later requests"
    )
    if demand.kv_memory_bytes is None:
        budget -= num_checkpoints * per_state
    return budget, num_checkpoints


def _cached_tokens(
    groups: tuple[AttentionSpec, ...], budget: int, demand: Demand, context: int, decisions: list[str]
) -> int:
    """Tokens that the block pools hold for all rows together."""
    tokens = demand.max_rows * context
    if _bytes(groups, tokens, demand) <= budget:
        decisions.append(f"{counted(demand.max_rows, 'row')} of {context} tokens: all fit")
        return tokens
    tokens = _most_tokens(groups, budget, demand, tokens)
    decisions.append(
        f"{tokens} tokens of KV cache shared by {counted(demand.max_rows, 'row')}: {budget} bytes hold no more"
    )
    return tokens


def checkpoint_interval(specs: tuple[CacheSpec, ...], chunk_tokens: int) -> int:
    """Tokens between the checkpoints that no conversation boundary asks for.

    So far apart that they cost at most what the keys and values between them cost, and whole chunks: prompts are cut
    there.
    """
    per_block = sum(spec.bytes_per_block for spec in attention_groups(specs))
    # Layers that keep nothing else have only checkpoints to go by; a long chunk then costs more than a state.
    worth = (recurrent_bytes(specs) or 0) * BLOCK_TOKENS / per_block if per_block else 0
    whole = -(-max(chunk_tokens, 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    return whole * max(1, ceil(worth / whole))


def _num_checkpoints(demand: Demand, per_state: int, context: int, budget: int) -> int:
    """Enough for every row's ends and for its context at wide intervals, within their share of ``budget``."""
    apart = checkpoint_interval(demand.specs, demand.step_tokens)
    wanted = demand.max_rows * (CHECKPOINTS_PER_ROW + context // apart)
    return min(wanted, int(budget * CHECKPOINT_SHARE) // per_state)


def _num_blocks(spec: AttentionSpec, tokens: int, demand: Demand) -> int:
    whole = -(-tokens // BLOCK_TOKENS)
    if spec.window is None:
        return max(1, whole)
    held = spec.blocks_for(demand.declared_context_tokens, demand.step_tokens)
    return max(1, min(whole, demand.max_rows * held))


def _bytes(groups: tuple[AttentionSpec, ...], tokens: int, demand: Demand) -> int:
    return sum(_num_blocks(spec, tokens, demand) * spec.bytes_per_block for spec in groups)


def _most_tokens(groups: tuple[AttentionSpec, ...], budget: int, demand: Demand, most: int) -> int:
    """The largest multiple of a block, at most ``most``, whose pools cost no more than ``budget``; 0 when none does."""
    low, high = 0, most // BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes(groups, middle * BLOCK_TOKENS, demand) <= budget:
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_TOKENS


def _name(spec: AttentionSpec) -> str:
    kind = "full attention" if spec.window is None else f"window {spec.window}"
    guests = sum(len(guest.layers) for guest in spec.guests)
    return f"{kind}, {counted(len(spec.layers), 'layer')}" + (f" and {guests} of the draft model" if guests else "")
