"""What a process really holds of memory, and giving back what blocks hold that nobody uses.

Refuses to know which blocks those are (``run/memory_guard.py``). Linux's /proc and madvise(2): where there is neither,
nothing is known and nothing given back. Pages come back as zeros when they are written or read again, as they were when
the pools were made.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from troth.cache.disk_reach import runs
from troth.cache.storage import CacheStorage
from troth.contracts.names import BlockId

_STATUS: Final = Path("/proc/self/status")
_OWN: Final = ("RssAnon:", "RssShmem:")
"""Pages of mapped files are the system's to take back; weights that are computed on where they lie are such."""
_MADV_DONTNEED: Final = 4
"""On Linux; other systems keep the content."""
MAX_RUNS: Final = 256
"""Stretches of blocks given back at once, the longest: each is a system call."""


def held_bytes(device: torch.device) -> Callable[[], int | None]:
    """Reads what this process holds: of main memory, or of a CUDA device what its allocator has taken."""
    if device.type == "cuda":
        return lambda: torch.cuda.memory_reserved(device)
    return _process_bytes


def _process_bytes() -> int | None:
    """Bytes of main memory that only this process can give back; None where that cannot be read."""
    try:
        lines = _STATUS.read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_OWN)) or None
    except (OSError, ValueError, IndexError):
        return None


class BlockMemory:
    """Gives back the memory of blocks.

    Args:
        cache: whose blocks they are.
        device: where they lie.
        finish_started: waits for steps under way, which may still write to blocks that nobody has any more; None:
            there are none.
    """

    def __init__(
        self, cache: CacheStorage, device: torch.device, finish_started: Callable[[], None] | None = None
    ) -> None:
        self._finish_started = finish_started
        self._pools: list[list[Tensor]] = []
        """Of each group, as the cache's."""
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise if _can_give_back(device) else None
        self._device = device
        self._left_bytes = 0
        """What the device's allocator could not give back the last time."""
        if self._madvise is not None:
            self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            self._pools = cache.pools

    @property
    def frees_blocks(self) -> bool:
        """Whether what blocks hold can be given back, so that it helps to forget cached ones."""
        return bool(self._pools)

    def give_back(self, block_ids: Sequence[Sequence[BlockId]]) -> None:
        """Give back what these blocks of each group hold, which nobody may read again before it is written.

        On a CUDA device the pools stay; what the allocator keeps for later is given back instead.
        """
        if self._finish_started is not None:
            self._finish_started()
        if self._device.type == "cuda":
            self._empty_allocator()
        for pool, ids in zip(self._pools, block_ids, strict=False):
            stretches = sorted(runs(sorted(ids), len(ids)), key=len, reverse=True)[:MAX_RUNS]
            for tensor in pool:
                first, stride = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
                for stretch in stretches:
                    self._drop(first + stretch.start * stride, first + stretch.stop * stride)

    def _empty_allocator(self) -> None:
        # It waits for the device, and what it cannot give back it cannot the next time either.
        if _kept_bytes(self._device) > self._left_bytes:
            torch.cuda.empty_cache()
            self._left_bytes = _kept_bytes(self._device)

    def _drop(self, start: int, end: int) -> None:
        """Drop the whole pages from one address to another; those at the ends belong to others, too."""
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            assert self._madvise is not None
            # A refusal costs memory that stays taken, nothing else.
            self._madvise(start, end - start, _MADV_DONTNEED)


def _kept_bytes(device: torch.device) -> int:
    """What a CUDA device's allocator holds and nobody uses."""
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _can_give_back(device: torch.device) -> bool:
    return device.type == "cpu" and sys.platform == "linux"
