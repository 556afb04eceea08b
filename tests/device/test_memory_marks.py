"""The memory marks on a card: what its allocator keeps is given back, blocks stay, and the hard mark refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import laws
from tests.cpu.test_laws import FAMILIES, requests
from tests.cpu.tiny_models import random_model, save
from tests.device.engines import builder
from troth.cache.block_memory import BlockMemory, held_bytes
from troth.contracts.names import RequestId
from troth.errors import Busy
from troth.ops import registry
from troth.run.memory_guard import Marks, MemoryGuard

pytestmark = pytest.mark.device
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
GPU = torch.device("cuda")
SPARE_BYTES = 2**28


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    registry.activate()
    return save(random_model(FAMILIES["qwen3"]), tmp_path_factory.mktemp("qwen3"))


def test_soft_mark_gives_back_what_the_allocator_keeps_and_leaves_the_cache(path: Path) -> None:
    build = builder(path, GPU, torch.float32)
    loop, scheduler = build(laws.Serving(prompt_cache=True))
    want = laws.serve_on(loop, scheduler, requests())
    read = held_bytes(GPU)
    before = read()
    assert before is not None
    spare = torch.empty(SPARE_BYTES, dtype=torch.uint8, device=GPU)
    del spare
    kept = read()
    assert kept is not None
    assert kept >= before + SPARE_BYTES
    blocks = BlockMemory(loop._runner._cache, GPU)  # type: ignore[attr-defined]
    guard = MemoryGuard(
        scheduler, Marks(kept - SPARE_BYTES // 2, kept), read, blocks.give_back, frees_blocks=blocks.frees_blocks
    )
    guard.follow()
    assert guard.status().held_bytes <= kept - SPARE_BYTES
    assert guard.status().num_shed_blocks == 0
    guard.require_room()
    again = [replace(one, request_id=RequestId(f"{one.request_id}-again")) for one in requests()]
    answers = laws.serve_on(loop, scheduler, again)
    laws.assert_same(answers, want)
    assert any(answer.end.usage.num_cached_tokens for answer in answers)


def test_hard_mark_refuses_although_nothing_can_be_given_back(path: Path) -> None:
    build = builder(path, GPU, torch.float32)
    loop, scheduler = build(laws.Serving(prompt_cache=True))
    laws.serve_on(loop, scheduler, requests())
    blocks = BlockMemory(loop._runner._cache, GPU)  # type: ignore[attr-defined]
    guard = MemoryGuard(scheduler, Marks(1, 1), held_bytes(GPU), blocks.give_back, frees_blocks=blocks.frees_blocks)
    guard.follow()
    assert guard.status().num_shed_blocks == 0, "forgetting blocks frees nothing on a card"
    with pytest.raises(Busy):
        guard.require_room()
