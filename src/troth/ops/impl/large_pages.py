"""Memory for packed weights in large pages, where the system has them.

A decode step walks through all weights, and pays for every page: with pages of 4 KiB 4 to 7 % on SmolLM2-135M. Linux
gives large ones to private memory that asks for them, in whole pages of 2 MiB; matrices are smaller than that, so they
lie side by side.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Final

import torch
from torch import Tensor

ALIGNED_BYTES: Final = 2 * 2**20
"""A large page's, on x86-64, and on ARM with small ones of 4 KiB."""
STRETCH_BYTES: Final = 32 * 2**20
"""Taken from the system at once. Where one ends, less than a matrix is left unused, and not touched."""
_LINE_BYTES: Final = 64


class LargePages:
    """Hands out memory. Any thread may ask; what it handed out lives as long as tensors over it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stretch: weakref.ref[mmap.mmap] | None = None
        """The last one, if somebody still has a part of it."""
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] from the beginning of a cache line on, all zeros."""
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            stretch = self._stretch() if self._stretch is not None else None
            if num_bytes > STRETCH_BYTES:  # a stretch of its own: what came behind it would keep all of it
                stretch, first = _new_stretch(num_bytes)
                return torch.frombuffer(stretch, dtype=torch.uint8, count=num_bytes, offset=first)
            if stretch is None or self._used + num_bytes > len(stretch):
                stretch, self._used = _new_stretch(STRETCH_BYTES)
                self._stretch = weakref.ref(stretch)
            first = self._used
            self._used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return torch.frombuffer(stretch, dtype=torch.uint8, count=num_bytes, offset=first)


def _new_stretch(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Memory with room for so much, and where in it the first large page begins."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, num_bytes), 0
    # Shared memory, which Python would take, gets no large pages by default.
    stretch = mmap.mmap(-1, num_bytes + ALIGNED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        stretch.madvise(mmap.MADV_HUGEPAGE)
    return stretch, -torch.frombuffer(stretch, dtype=torch.uint8, count=1).data_ptr() % ALIGNED_BYTES
