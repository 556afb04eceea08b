"""How many checkpoints a plan gives to a model with recurrent layers, and how far apart they are."""

from __future__ import annotations

import pytest

from tests.portable.test_cli_fit import Planner
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.cache_spec import AttentionSpec, CacheSpec, RecurrentSpec, StateTensor
from troth.schedule.sizing import checkpoint_interval

MIB = 2**20


def specs(state_numbers: int, *, attends: bool = True) -> tuple[CacheSpec, ...]:
    attention = AttentionSpec(layers=(0, 2), num_kv_heads=1, head_dim=16, value_dim=16, element_bytes=4)
    recurrent = RecurrentSpec(layers=(1,), tensors=(StateTensor((state_numbers,), 4),))
    return (attention, recurrent) if attends else (recurrent,)


@pytest.mark.parametrize(
    ("state_numbers", "chunk_tokens", "interval"),
    # 256 bytes of keys and values per token: a state of 2**16 numbers is worth 1,024 of them.
    [(2**16, 256, 1024), (2**16, 2048, 2048), (2**16 + 1, 256, 1280), (1, 256, 256), (2**16, 100, 1120)],
)
def test_checkpoint_interval_costs_no_more_than_what_lies_between(
    state_numbers: int, chunk_tokens: int, interval: int
) -> None:
    assert checkpoint_interval(specs(state_numbers), chunk_tokens) == interval
    assert interval % 16 == 0


def test_checkpoint_interval_is_a_chunk_where_nothing_else_is_kept() -> None:
    assert checkpoint_interval(specs(2**20, attends=False), 256) == 256


def test_plan_counts_the_bytes_of_checkpoints() -> None:
    plan = Planner(usable_bytes=64 * MIB)(ModelOptions(), EngineOptions())
    assert plan.num_checkpoints == 28
    assert plan.checkpoint_bytes == 28 * plan.bytes_per_checkpoint == 28 * 2**18
    parts = plan.weights_bytes + plan.kv_bytes + plan.state_bytes + plan.checkpoint_bytes
    assert plan.total_bytes == parts + plan.transient_bytes + plan.reserve_bytes
    assert plan.fits


def test_plan_with_room_gives_each_row_its_ends_and_its_intervals() -> None:
    plan = Planner(usable_bytes=1024 * MIB)(ModelOptions(), EngineOptions())
    assert plan.num_checkpoints == 8 * (4 + 4096 // 1024)


def test_plan_takes_checkpoints_beside_a_cache_of_given_size() -> None:
    plan = Planner(usable_bytes=64 * MIB)(ModelOptions(), EngineOptions(kv_memory_bytes=8 * MIB))
    assert plan.kv_bytes == 8 * MIB
    assert plan.num_checkpoints == 8
