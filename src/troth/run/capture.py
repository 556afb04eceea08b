"""How a piece of computing is kept to run again: by a recording of operations on a CPU, by a CUDA graph on a GPU.

Refuses to know what is computed, and whether running it again does the same: ``proved.py`` finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

import torch
from torch import Tensor

_CLOSE: Final = 1e-2
"""What running again may differ by on a GPU: room for libraries that sum in no fixed order."""

Computed = Sequence[Tensor]
Capture = Callable[[Callable[[], Computed]], tuple[Callable[[], None], Computed]]
"""Calls a function once and gives back how to run it again, on what its inputs hold then, and its results, which are
overwritten each time. It may not have computed anything yet."""


class Recording(Protocol):
    """Operations that can run again."""

    def run(self) -> None:
        """Run them on what their buffers hold now."""

    def spoil(self) -> None:
        """Fill what they write with NaN."""


Record = Callable[[], AbstractContextManager[Recording]]


def capture_by(record: Record) -> Capture:
    """Keeps what runs inside of recordings; all that it wrote is spoilt."""

    def capture(run: Callable[[], Computed]) -> tuple[Callable[[], None], Computed]:
        with record() as recording:
            results = run()
        recording.spoil()
        return recording.run, results

    return capture


def cuda_capture() -> Capture:
    """Captures CUDA graphs that share one pool of memory: they run one after the other, never side by side."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Computed]) -> tuple[Callable[[], None], Computed]:
        graph = torch.cuda.CUDAGraph()
        # Threads that make masks may wait for the device meanwhile; only this thread's calls are captured.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = run()
        return graph.replay, results

    return capture


def near(left: Tensor, right: Tensor) -> bool:
    """Whether two results are the same, on a GPU but for ``_CLOSE``; NaN is NaN."""
    tolerance = 0.0 if left.device.type == "cpu" else _CLOSE
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
