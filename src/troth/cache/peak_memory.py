"""How much memory some work takes for a while, beyond what was held before it.

Refuses to know what the work is (``run/step_cost.py``). CUDA devices count what their allocator hands out. On Linux the
kernel keeps the largest number of pages a process ever had, and begins anew when asked (proc(5), clear_refs); elsewhere
nothing is known.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"


def peak_bytes(device: torch.device, work: Callable[[], None]) -> int | None:
    """Do some work; most bytes that it held at once. None where that cannot be told.

    On a CPU other threads of the process must not take memory meanwhile, or it counts as the work's.
    """
    if device.type == "cuda":
        return _device_bytes(device, work)
    return _process_bytes(work)


def _device_bytes(device: torch.device, work: Callable[[], None]) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _process_bytes(work: Callable[[], None]) -> int | None:
    # What was freed before lies ready for the work, and would not show.
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
    try:
        _CLEAR.write_text(_RESET_PEAK)
        before = _status_bytes("VmRSS:")
    except (OSError, ValueError):
        before = None
    work()
    if before is None:
        return None
    try:
        return max(0, _status_bytes("VmHWM:") - before)
    except (OSError, ValueError):
        return None


def _status_bytes(name: str) -> int:
    """Raises OSError, and ValueError when the line is not there."""
    line = next((line for line in _STATUS.read_text().splitlines() if line.startswith(name)), "")
    if not line:
        raise ValueError(f"{_STATUS} has no line {name}")
    return int(line.split()[1]) * 1024
