"""How many blocks each pool gets, and so how long a context and how many rows fit. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from troth.contracts.cache_spec import AttentionSpec, CacheSpec, RecurrentSpec, attention_groups
from troth.contracts.memory_plan import GroupPlan, MemoryPlan
from troth.contracts.names import BLOCK_TOKENS
from troth.errors import OptionError

CACHE_SHARE = 0.5
"""Of what the weights leave, the most the pools take unless told otherwise."""


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


def plan_memory(demand: Demand) -> MemoryPlan:
    """Give every row its context if that fits into the cache's share; else share what there is, and say so.

    A plan that cannot hold one row of one block has a context of 0 tokens and does not fit.

    Raises:
        OptionError: the wanted context exceeds the declared one, or the given cache size cannot hold one row.
    """
    decisions: list[str] = []
    context = demand.declared_context_tokens
    if demand.wanted_context_tokens is not None:
        if demand.wanted_context_tokens > context:
            raise OptionError(
                f"context of {demand.wanted_context_tokens} tokens: this model was made for {context}; "
                "ask for at most that"
            )
        context = demand.wanted_context_tokens
        decisions.append(f"context {context} tokens: as asked")
    groups = attention_groups(demand.specs)
    states = [spec for spec in demand.specs if isinstance(spec, RecurrentSpec)]
    state_bytes = demand.max_rows * sum(spec.state_bytes for spec in states)
    fixed = demand.weights_bytes + demand.transient_bytes + demand.reserve_bytes + state_bytes
    left = max(0, demand.usable_bytes - fixed)
    budget = demand.kv_memory_bytes if demand.kv_memory_bytes is not None else int(left * CACHE_SHARE)

    tokens = demand.max_rows * context
    if _bytes(groups, tokens, demand) > budget:
        tokens = _most_tokens(groups, budget, demand, tokens)
        decisions.append(f"{tokens} tokens of KV cache shared by {demand.max_rows} rows: {budget} bytes hold no more")
    else:
        decisions.append(f"{demand.max_rows} rows of {context} tokens: all fit")
    if groups and tokens < context:
        context = tokens
        decisions.append(f"context {context} tokens: what the KV cache holds for one row")
    plan = MemoryPlan(
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
    )
    if context < BLOCK_TOKENS:
        if demand.kv_memory_bytes is not None:
            least = _bytes(groups, BLOCK_TOKENS, demand)
            raise OptionError(f"{budget} bytes of KV cache hold no row; the least that does is {least}")
        plan = replace(plan, context_tokens=0)
    return plan


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
    return f"{kind}, {len(spec.layers)} layers"
