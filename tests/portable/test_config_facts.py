"""Memory this process may take: the machine's, or what its cgroup leaves of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from troth.config import facts
from troth.config.facts import GpuFacts, read_facts

KIB = 1024
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\nHugePages_Total:   0\n"


def measured(
    monkeypatch: pytest.MonkeyPatch, folder: Path, meminfo: str | None, limit: str | None, used: str | None
) -> tuple[int, int]:
    for name, text in (("meminfo", meminfo), ("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (folder / name).write_text(text)
    monkeypatch.setattr(facts, "_MEMINFO", folder / "meminfo")
    monkeypatch.setattr(facts, "_CGROUP", folder)
    found = read_facts()
    return found.total_bytes, found.available_bytes


@pytest.mark.parametrize(
    ("limit", "used", "total", "available"),
    [
        (None, None, 1000, 600),
        ("max\n", "5\n", 1000, 600),
        (f"{800 * KIB}\n", f"{300 * KIB}\n", 800, 500),
        (f"{800 * KIB}\n", f"{100 * KIB}\n", 800, 600),
        (f"{800 * KIB}\n", None, 800, 600),
        (f"{200 * KIB}\n", f"{300 * KIB}\n", 200, 0),
        (f"{5000 * KIB}\n", "0\n", 1000, 600),
    ],
)
def test_facts_memory_is_the_least_of_the_machine_and_the_cgroup(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    limit: str | None,
    used: str | None,
    total: int,
    available: int,
) -> None:
    assert measured(monkeypatch, tmp_path, MEMINFO, limit, used) == (total * KIB, available * KIB)


@pytest.mark.parametrize("meminfo", [None, "MemTotal: 1000 kB\n", "MemTotal: many\nMemAvailable: 1 kB\n"])
def test_facts_memory_where_meminfo_cannot_be_read_is_all_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, meminfo: str | None
) -> None:
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert measured(monkeypatch, tmp_path, meminfo, None, None) == (pages, pages)


def test_facts_count_the_cores_this_process_may_use_and_keep_the_gpus() -> None:
    gpu = GpuFacts(index=0, name="card", total_bytes=2, free_bytes=1, capability=(9, 0))
    found = read_facts((gpu,))
    assert 1 <= found.num_cores <= (os.cpu_count() or 1)
    assert found.gpus == (gpu,)
