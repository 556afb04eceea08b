"""Launches that overlap: a kernel may start while the one before it still runs, up to where it needs its results.

NVIDIA calls it programmatic dependent launch (compute capability 9.0 on). In a step of small kernels each would
otherwise wait a microsecond for the last block of the one before. Every kernel launched with ``launch_pdl`` calls
``await_inputs`` in every program, before it reads what another kernel wrote or writes anything; only weights may be
read earlier.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from troth.ops.impl.triton import INTERPRETED

OVERLAP: Final = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def await_inputs(OVERLAP: tl.constexpr) -> None:
    """Wait for the results of earlier kernels, and let the next one start."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
