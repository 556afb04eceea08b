"""Weights on their way from a mapped file to a GPU: several threads fetch pages and send them, side by side.

One thread alone waits for page faults and for the copy in turn; that makes the start of a large model several times
longer. Refuses to know what the tensors are. Used by ``ops/linear.py``'s ``dense``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from queue import SimpleQueue
from typing import Final

import torch
from torch import Tensor

from troth.config.facts import num_cores

CHUNK_BYTES: Final = 16 * 2**20
MOST_LANES: Final = 8
"""Threads, each with a pinned buffer of a chunk and a stream: more do not fill the bus better."""
LEAST_BYTES: Final = 4 * 2**20
"""What is smaller goes the ordinary way."""


def placed(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the host on ``device``, as ``dtype``. The same tensor where nothing has to change."""
    is_sent = device.type == "cuda" and tensor.device.type == "cpu"
    if not is_sent or tensor.nbytes < LEAST_BYTES or not tensor.is_contiguous():
        return tensor.to(device=device, dtype=dtype)
    there = torch.empty_like(tensor, device=device)
    _lanes(device).send(tensor.view(-1).view(torch.uint8), there.view(-1).view(torch.uint8))
    return there.to(dtype)


def release() -> None:
    """Give the threads and their pinned memory back, once a model is loaded."""
    _lanes.cache_clear()


@cache
def _lanes(device: torch.device) -> _Lanes:
    return _Lanes(device)


class _Lanes:
    """Threads that copy chunks to one device."""

    def __init__(self, device: torch.device) -> None:
        count = min(MOST_LANES, num_cores())
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="troth-upload")
        self._free: SimpleQueue[tuple[Tensor, torch.cuda.Stream]] = SimpleQueue()
        for _ in range(count):
            buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            self._free.put((buffer, torch.cuda.Stream(device)))

    def send(self, here_B: Tensor, there_B: Tensor) -> None:
        """Copy bytes; done when it returns."""
        # The memory was handed out on this thread's stream, whose earlier work may still use it.
        torch.cuda.current_stream(there_B.device).synchronize()
        pairs = zip(here_B.split(CHUNK_BYTES), there_B.split(CHUNK_BYTES), strict=True)
        for done in [self._threads.submit(self._copy, here, there) for here, there in pairs]:
            done.result()

    def _copy(self, here_B: Tensor, there_B: Tensor) -> None:
        buffer, stream = self._free.get()
        try:
            with torch.cuda.stream(stream):
                part = buffer[: here_B.numel()]
                part.copy_(here_B)
                there_B.copy_(part, non_blocking=True)
                stream.synchronize()
        finally:
            self._free.put((buffer, stream))
