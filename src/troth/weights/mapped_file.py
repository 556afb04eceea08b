"""Tensors that are views of a file: nothing is copied until somebody changes a byte.

Owns the map of one file. Refuses to know which tensors there are; the headers of ``artifact/`` say that.

Lifetime: every tensor holds a reference to the map, so the map lives as long as the last of them, also
after this object is gone; the file itself may be deleted meanwhile, but must not be cut short. The map is
copy-on-write: writing to a tensor never changes the file, but is lost when pages are dropped while more
tensors are read; copy first. Pages nobody touched cost no memory, and clean ones belong to the page cache,
shared by all processes that map the file.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from troth.artifact.regular_file import FileStamp, RegularFile

_FORGET_BYTES: Final = 64 * 2**20
"""Handed out between two times that pages are dropped."""


class MappedFile:
    """One weight file, mapped once.

    Raises:
        ModelLoadError: the file is gone, or is not the one ``stamp`` was taken of.
    """

    __slots__ = ("_map", "_num_handed_bytes")

    def __init__(self, path: Path, stamp: FileStamp) -> None:
        with RegularFile(path) as file:
            file.expect(stamp)
            # A read-only map would make torch.frombuffer warn; a private one is writable and as cheap.
            self._map = file.map_private()
        self._num_handed_bytes = 0

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The bytes at ``offset`` as a contiguous tensor; a copy when misaligned, as kernels may demand it."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        self._forget_pages(count * dtype.itemsize)
        if offset % dtype.itemsize:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
            return raw.clone().view(dtype).reshape(shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(shape)

    def _forget_pages(self, num_bytes: int) -> None:
        """Drop pages read so far, now and then: a model that lays its weights out anew does not hold the file besides.

        Nothing is lost. A view that is read again finds its pages in the system's cache, or in the file.
        """
        if self._num_handed_bytes > _FORGET_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._num_handed_bytes = 0
        self._num_handed_bytes += num_bytes
