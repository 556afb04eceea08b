"""Giving the memory of free blocks back: the process holds less, and no other block changes."""

from __future__ import annotations

import sys

import pytest
import torch

from troth.cache.block_memory import BlockMemory, held_bytes
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BlockId

CPU = torch.device("cpu")
SPECS = tuple(
    AttentionSpec(layers=layers, num_kv_heads=3, head_dim=44, value_dim=24, element_bytes=2, window=window)
    for layers, window in (((0, 2), None), ((1,), 64))
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise(2) gives memory back on Linux alone")


def test_block_memory_leaves_every_other_block_as_it_is() -> None:
    """Blocks of 13,056 and 6,528 bytes: pages belong to two of them."""
    cache = CacheStorage(SPECS, (64, 32), 1, dtype=torch.float16, device=CPU)
    for layer, kv in cache.kv.items():
        kv.k_NKDS.fill_(layer + 1)
        kv.v_NKSD.fill_(-layer - 1)
    free = ([*range(3, 31), 40, *range(50, 64)], [*range(9), 31])
    BlockMemory(cache, CPU).give_back([[BlockId(i) for i in ids] for ids in free])
    zeroed = 0
    for layer, kv in cache.kv.items():
        for tensor, value in ((kv.k_NKDS, layer + 1), (kv.v_NKSD, -layer - 1)):
            ids = free[cache.group_of[layer]]
            kept = [i for i in range(tensor.shape[0]) if i not in ids]
            assert bool((tensor[kept] == value).all()), "a block that is in use lost what it held"
            zeroed += int((tensor[ids] == 0).sum())
    assert zeroed > 200_000 // 2, "or nothing was given back"


def test_block_memory_makes_the_process_smaller() -> None:
    layers = tuple(range(8))
    spec = AttentionSpec(layers=layers, num_kv_heads=4, head_dim=64, value_dim=64, element_bytes=2)
    read = held_bytes(CPU)
    cache = CacheStorage((spec,), (1024,), 1, dtype=torch.float16, device=CPU)
    for kv in cache.kv.values():
        kv.k_NKDS.fill_(1)
        kv.v_NKSD.fill_(1)
    used = read()
    BlockMemory(cache, CPU).give_back([[BlockId(i) for i in range(256, 1024)]])
    left = read()
    assert used is not None
    assert left is not None
    assert cache.num_bytes > 120 * 2**20
    assert 0.68 * cache.num_bytes < used - left < 0.8 * cache.num_bytes, "three quarters of the blocks are free"


def test_held_bytes_are_those_of_this_process() -> None:
    read = held_bytes(CPU)
    before = read()
    assert before is not None
    assert before > 2**24
    # So much that what the rest of this process gives back meanwhile does not matter.
    taken = bytearray(512 * 2**20)
    taken[::4096] = b"x" * len(taken[::4096])
    after = read()
    assert after is not None
    assert 400 * 2**20 < after - before < 600 * 2**20


class Allocator:
    """As ``torch.cuda`` tells of one, of which a part cannot be given back."""

    def __init__(self) -> None:
        self.used, self.kept, self.num_emptied = 100, 50, 0

    def memory_reserved(self, device: torch.device) -> int:
        return self.used + self.kept

    def memory_allocated(self, device: torch.device) -> int:
        return self.used

    def empty_cache(self) -> None:
        self.num_emptied += 1
        self.kept = min(self.kept, 10)


def test_block_memory_of_a_device_empties_its_allocator_when_that_gives_something_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Emptying it waits for the device, twice a second as long as too much is held."""
    allocator = Allocator()
    monkeypatch.setattr(torch, "cuda", allocator)
    device = torch.device("cuda")
    memory, read = (
        BlockMemory(CacheStorage(SPECS, (4, 4), 1, dtype=torch.float16, device=CPU), device),
        held_bytes(device),
    )
    assert not memory.frees_blocks
    assert read() == 150
    for _ in range(3):
        memory.give_back([[BlockId(0)], []])
    assert (read(), allocator.num_emptied) == (110, 1)
    allocator.kept = 70
    memory.give_back([[], []])
    assert (read(), allocator.num_emptied) == (110, 2)
    assert BlockMemory(CacheStorage(SPECS, (4, 4), 1, dtype=torch.float16, device=CPU), CPU).frees_blocks
