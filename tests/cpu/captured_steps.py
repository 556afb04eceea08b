"""One model's caches with its steps, ordinary and captured, plans of rows with any drafts, a capture for any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups
from troth.contracts.names import BlockId, RequestId, Row
from troth.contracts.plan import NO_SAMPLE, BlockUpdate, StepPlan
from troth.models.family import Model, Placement
from troth.run.capture import Capture, Computed
from troth.run.device_batch import DeviceBatches
from troth.run.graphs import DecodeGraphs

MAX_ROWS: Final = 5


def run_again(run: Callable[[], Computed]) -> tuple[Callable[[], None], Computed]:
    """A capture that runs the step again, into the same results."""
    results = [result.clone() for result in run()]

    def replay() -> None:
        for result, again in zip(results, run(), strict=True):
            result.copy_(again)

    return replay, results


class Side:
    """One model's caches, and the steps over them."""

    def __init__(
        self, model: Model, capture: Capture, place: Placement, batches: type[DeviceBatches] = DeviceBatches
    ) -> None:
        specs, tokens = model.config.cache_specs(place.dtype.itemsize), place.context_tokens
        groups = attention_groups(specs)
        self.model = model
        self.cache = CacheStorage(specs, (10,) * len(groups), MAX_ROWS, dtype=place.dtype, device=place.device)
        self.batches = batches(groups, MAX_ROWS, tokens, place.device)
        self.graphs = DecodeGraphs(model, self.cache, self.batches, capture, max_rows=MAX_ROWS, context_tokens=tokens)

    @torch.inference_mode()
    def ordinary(self, plan: StepPlan) -> Tensor:
        self.batches.follow(plan)
        return self.model.logits(self.model.forward(self.batches.build(plan), self.cache))

    @torch.inference_mode()
    def captured(self, plan: StepPlan) -> Tensor:
        self.batches.follow(plan)
        logits = self.graphs.logits(plan)
        assert logits is not None
        assert self.graphs.refusal is None
        return logits


def plan_of(
    fed: Mapping[int, tuple[int, int]], recalls: Mapping[int, int] | None = None, *, num_groups: int = 0
) -> StepPlan:
    """Rows, with the position each goes on from and how many tokens it feeds; prompts where there are groups."""
    rows = sorted(fed, key=lambda row: fed[row][1] > 1)
    plan = StepPlan(0, [Row(row) for row in rows], [RequestId(str(row)) for row in rows])
    plan.starts, plan.num_new = [fed[row][0] for row in rows], [fed[row][1] for row in rows]
    plan.num_draft = [0 if num_groups else count - 1 for count in plan.num_new]
    plan.sample_steps = [NO_SAMPLE if num_groups else 1] * len(rows)
    plan.token_ids = [(7 * start + 3 * i + row) % 100 for row in rows for start, n in [fed[row]] for i in range(n)]
    plan.num_decodes = 0 if num_groups else plan.num_new.count(1)
    plan.num_verifies = 0 if num_groups else len(rows) - plan.num_decodes
    plan.recalls = {rows.index(row): count for row, count in (recalls or {}).items()}
    if num_groups:
        plan.block_updates = [
            BlockUpdate(Row(row), group, 0, [BlockId(2 * row), BlockId(2 * row + 1)])
            for row in rows
            for group in range(num_groups)
        ]
    return plan


def prompts(num_groups: int) -> StepPlan:
    """Of three rows with two blocks each."""
    return plan_of({0: (0, 5), 2: (0, 9), 4: (0, 3)}, num_groups=num_groups)


def steps() -> list[StepPlan]:
    """Behind those prompts: rows that recall any number of drafts, feed any, or none; four are a capture's."""
    return [
        plan_of({0: (5, 4), 2: (9, 3), 4: (3, 1)}),
        plan_of({0: (8, 3), 2: (10, 1), 4: (4, 4)}, {0: 2}),  # of row 0 two drafts were right, of row 2 none
        plan_of({0: (9, 1), 2: (11, 1), 4: (8, 3)}, {4: 3}),
    ]
