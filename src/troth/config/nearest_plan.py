"""When a model does not fit: the plan that does and changes least.

Refuses to know how plans are made: it asks for one with changed options. Read next: ``run/planned.py``, which does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final

from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.memory_plan import MemoryPlan
from troth.errors import OptionError

MIN_CONTEXT_TOKENS: Final = 512
"""Smaller contexts are not proposed."""

PlanWith = Callable[[ModelOptions, EngineOptions], MemoryPlan]


@dataclass(frozen=True, slots=True)
class Change:
    """Option values that differ from what was asked, and the flags that say so."""

    flags: Mapping[str, str | None]
    """Flag -> its value; None: leave the flag out."""
    model: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: Change) -> Change:
        return Change({**self.flags, **other.flags}, {**self.model, **other.model}, {**self.engine, **other.engine})

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" if value else f"(without {name})" for name, value in self.flags.items())


def nearest_plan(
    plan_with: PlanWith, unfit: MemoryPlan, model: ModelOptions, engine: EngineOptions
) -> tuple[Change, MemoryPlan] | None:
    """The first plan that fits, trying each change alone, then more and more of them together.

    Args:
        plan_with: makes a plan for options.
        unfit: the plan that does not fit, made with ``model`` and ``engine``.
    """
    for change in _candidates(unfit, model, engine):
        try:
            plan = plan_with(replace(model, **change.model), replace(engine, **change.engine))
        except OptionError:
            continue  # this combination cannot be planned at all
        if plan.fits:
            return change, plan
    return None


def _candidates(unfit: MemoryPlan, model: ModelOptions, engine: EngineOptions) -> Iterator[Change]:
    """What could be given up, the least painful first. Of halvings that add up, the last one counts."""
    cache, context, rows, dtype = _cache(unfit, model, engine), _context(unfit, model), _rows(unfit), _dtype(unfit)
    yield from (*cache, *context, *rows, *dtype)
    yield from accumulate([*cache, *rows, *dtype, *context])


def _cache(unfit: MemoryPlan, model: ModelOptions, engine: EngineOptions) -> list[Change]:
    changes = []
    if (model.kv_dtype or model.dtype or unfit.dtype) == "float32":
        changes.append(Change({"--kv-dtype": "bfloat16"}, model={"kv_dtype": "bfloat16"}))
    if engine.kv_memory_bytes is not None:
        changes.append(Change({"--kv-memory": None}, engine={"kv_memory_bytes": None}))
    return changes


def _context(unfit: MemoryPlan, model: ModelOptions) -> list[Change]:
    most = model.context_tokens or unfit.declared_context_tokens
    return [
        Change({"--context": str(tokens)}, model={"context_tokens": tokens})
        for tokens in _halves(most, MIN_CONTEXT_TOKENS)
    ]


def _rows(unfit: MemoryPlan) -> list[Change]:
    return [Change({"--rows": str(rows)}, engine={"max_rows": rows}) for rows in _halves(unfit.max_rows, 1)]


def _dtype(unfit: MemoryPlan) -> list[Change]:
    return [Change({"--dtype": "bfloat16"}, model={"dtype": "bfloat16"})] if unfit.dtype == "float32" else []


def _halves(number: int, least: int) -> Iterator[int]:
    while (number := number // 2) >= least:
        yield number
