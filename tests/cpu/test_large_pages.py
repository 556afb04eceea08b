"""Memory for packed weights: parts of large stretches, which nobody else gets and which go when the last part does."""

from __future__ import annotations

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from troth.ops.impl.large_pages import ALIGNED_BYTES, STRETCH_BYTES, LargePages


def test_parts_lie_side_by_side_in_lines_of_their_own() -> None:
    pages = LargePages()
    sizes = [1, 64, 65, 1000, STRETCH_BYTES // 2, STRETCH_BYTES // 2, 3 * STRETCH_BYTES]
    parts = [pages.take(num_bytes) for num_bytes in sizes]
    assert [len(part) for part in parts] == sizes
    assert pages.take(0).shape == (0,)
    spans = sorted((part.data_ptr(), part.data_ptr() + len(part)) for part in parts)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert not any(part[:: max(1, len(part) // 7)].any() for part in parts), "memory was used before"
    for number, part in enumerate(parts, start=1):
        part.fill_(number)
    for number, part in enumerate(parts, start=1):
        assert (part == number).all()


def test_parts_taken_in_several_threads_do_not_meet() -> None:
    pages = LargePages()
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(pages.take, [1000] * 200))
    assert len({part.data_ptr() for part in parts}) == 200


def test_a_stretch_goes_with_its_last_part() -> None:
    pages = LargePages()
    first, second = pages.take(10), pages.take(20)
    assert pages._stretch is not None
    del first
    gc.collect()
    assert pages._stretch() is not None
    second.fill_(3)
    del second
    gc.collect()
    assert pages._stretch() is None
    assert not pages.take(10).any()


def test_a_large_part_shares_its_stretch_with_nobody() -> None:
    pages = LargePages()
    small = pages.take(10)
    kept = pages._stretch
    pages.take(STRETCH_BYTES + 1)
    assert pages._stretch is kept
    assert 0 < pages.take(10).data_ptr() - small.data_ptr() < STRETCH_BYTES


def test_linux_is_asked_for_large_pages() -> None:
    """Of shared memory, which Python takes by default, it gives none."""
    maps = Path("/proc/self/smaps")
    if not maps.exists() or "VmFlags" not in maps.read_text():
        pytest.skip("this system does not tell")
    part = LargePages().take(4 * ALIGNED_BYTES)
    (mapping,) = [
        text
        for text in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", maps.read_text())
        if text and _holds(text, part.data_ptr())
    ]
    assert mapping.split()[1] == "rw-p"
    assert "hg" in mapping[mapping.index("VmFlags:") :].split()


def _holds(mapping: str, address: int) -> bool:
    first, last = (int(text, 16) for text in mapping.split(maxsplit=1)[0].split("-"))
    return first <= address < last
