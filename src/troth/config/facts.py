"""What this machine is: cores and memory this process may use. Reads /proc and cgroup files; no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One CUDA device, filled in by ring 2 (it takes torch to ask)."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    """NVIDIA's number of its generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Inputs of every automatic decision."""

    num_cores: int
    """Cores this process may be scheduled on."""
    total_bytes: int
    available_bytes: int
    """Main memory that can be taken now without swapping, limited by this process's cgroup."""
    gpus: tuple[GpuFacts, ...] = ()


def num_cores() -> int:
    """Cores this process may be scheduled on; where the system does not say, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_facts(gpus: tuple[GpuFacts, ...] = ()) -> MachineFacts:
    """Ask the operating system."""
    total, available = _memory(_MEMINFO, _CGROUP)
    return MachineFacts(
        num_cores=num_cores(),
        total_bytes=total,
        available_bytes=available,
        gpus=gpus,
    )


def _memory(meminfo: Path, cgroup: Path) -> tuple[int, int]:
    """(total, available) bytes; where /proc/meminfo is absent, the page counts of sysconf for both."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None:
        total = min(total, limit)
        available = min(available, max(0, limit - (used or 0)))
    return total, available


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or the word "max"
        return None
