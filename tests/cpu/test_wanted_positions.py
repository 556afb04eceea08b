"""A step that needs few hidden states computes them as one that needs all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.test_laws import FAMILIES
from tests.cpu.tiny_models import CONTEXT, CPU, load, random_ids, random_model, save
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups
from troth.contracts.names import BlockId, RequestId, Row
from troth.contracts.plan import NO_SAMPLE, BlockUpdate, StepPlan
from troth.nn.batch import Wanted
from troth.run.batch import BatchBuilder


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_gives_wanted_positions_as_it_gives_all(family: str, tmp_path: Path) -> None:
    model = load(save(random_model(FAMILIES[family]), tmp_path))
    specs = model.config.cache_specs(4)
    groups = attention_groups(specs)
    plan = StepPlan(0, [Row(0), Row(1)], [RequestId("a"), RequestId("b")], [0, 0], [21, 12], [0, 0], [0, NO_SAMPLE])
    plan.token_ids = random_ids(33)
    plan.block_updates = [
        BlockUpdate(Row(row), group, 0, [BlockId(2 * row), BlockId(2 * row + 1)])
        for row in range(2)
        for group in range(len(groups))
    ]

    def hidden(positions: list[int] | None) -> Any:
        cache = CacheStorage(specs, (4,) * len(groups), 2, dtype=torch.float32, device=CPU)
        batches = BatchBuilder(groups, 2, CONTEXT)
        batches.follow(plan)
        batch = batches.build(plan)
        batch.wanted = None if positions is None else Wanted(torch.tensor(positions), 0)
        with torch.inference_mode():
            return model.forward(batch, cache)

    whole = hidden(None)
    for wanted in ([0], [20], [3, 20, 32]):
        assert torch.allclose(hidden(wanted), whole[wanted], rtol=1e-5, atol=1e-5)
