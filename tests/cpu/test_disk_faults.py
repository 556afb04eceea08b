"""What goes wrong around a disk tier: clocks, full disks, damage of any file, and processes that begin its index anew.

The same every time: what is served is right, nothing raises, and whoever comes next finds every file and its bytes.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests import laws
from tests.cpu.disk_blocks import NAMESPACE, QUOTA, chain, tensors_of
from tests.cpu.disk_world import TOPOLOGIES, text, world
from tests.cpu.test_disk_tier import check_quota, files, put, served, tier
from tests.cpu.test_laws import FAMILIES
from tests.cpu.tiny_models import load, random_model, save
from troth.cache import disk_folder, disk_scratch
from troth.cache.disk_bundle import Bundle, write_bundle
from troth.cache.disk_index import FILE_NAME, DiskIndex

CLOCKS = ("time", "time_ns", "monotonic", "perf_counter")


@pytest.fixture(name="backwards")
def _backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every clock says an hour less each time it is asked."""
    ticks = count(1)
    for name in CLOCKS:
        monkeypatch.setattr(time, name, lambda: 10**10 - 3600 * next(ticks))


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As a disk that is full: what is written past so many bytes of a file is refused, in the middle of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_tier_keeps_what_was_used_last_whatever_the_clock_says(tmp_path: Path, backwards: None) -> None:
    with tier(tmp_path) as opened:
        for number in range(4):
            put(opened, chain(number))
        size = opened.status().num_bytes // 4
    for age, file in enumerate(files(tmp_path)):
        os.utime(file, (2**33 - age, 2**33 - age))
    with tier(tmp_path, quota_bytes=2 * size + size // 2) as opened:
        assert [served(opened, chain(number)) for number in range(4)] == [0, 0, 8, 8]
        served(opened, chain(2))
        put(opened, chain(4))
        assert [served(opened, chain(number)) for number in (2, 3, 4)] == [8, 0, 8]


@pytest.mark.parametrize("family", TOPOLOGIES)
def test_disk_cache_answers_alike_when_every_clock_runs_backwards(
    tmp_path: Path, family: str, request: pytest.FixtureRequest
) -> None:
    model = load(save(random_model(FAMILIES[family]), tmp_path / "model"))
    with world(model, tmp_path / "cache") as before:
        cold = before.serve(text())
    request.getfixturevalue("backwards")
    with world(model, tmp_path / "cache") as after:
        laws.assert_same(after.serve(text()), cold)
        assert after.status.num_restores == {"restored": 1}


def test_disk_tier_on_a_disk_that_is_full_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        with largest_file(5000):
            opened.offer("kv0", chain(2), tensors_of(chain(2)))
            assert opened.flush()
        assert "cannot be written" in opened.status().trouble
        assert [served(opened, chain(number)) for number in (1, 2)] == [8, 0]
        assert [path.name for path in tmp_path.glob("scratch-*/*")] == ["lock"]
    check_quota(tmp_path)


def test_disk_tier_on_a_disk_that_is_read_only_holds_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**arguments: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    with tier(tmp_path) as opened:
        put(opened, chain(1))
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkdtemp", refuse)
        with tier(tmp_path) as opened:
            assert "Read-only file system" in opened.status().trouble
            assert not opened.offer("kv0", chain(2), tensors_of(chain(2)))
            assert served(opened, chain(1)) == 0
    check_quota(tmp_path)


def test_disk_tier_whose_index_has_no_room_says_so_and_counts_right_afterwards(tmp_path: Path) -> None:
    with tier(tmp_path, quota_bytes=10**7) as opened:
        put(opened, chain(1))
        index = opened._folder._index
        assert index is not None
        (pages,) = index._db.execute("PRAGMA page_count").fetchone()
        index._db.execute(f"PRAGMA max_page_count = {pages}")
        for number in range(2, 20):
            opened.offer("kv0", chain(number), tensors_of(chain(number)))
        assert opened.flush()
        assert "full" in opened.status().trouble
        assert served(opened, chain(1)) == 8
    check_quota(tmp_path)


def test_disk_tier_survives_any_damage_to_what_a_killed_process_left(tmp_path: Path) -> None:
    """Bytes flipped and ends cut off, of the database, of its write-ahead log and of the files, several at once."""
    num_served = 0
    with tier(tmp_path / "living") as opened:
        for number in range(4):
            put(opened, chain(number))
        for seed in range(20):
            generator, left = random.Random(seed), tmp_path / str(seed)
            shutil.copytree(opened.folder, left)
            found = [left / FILE_NAME, left / f"{FILE_NAME}-wal", *files(left)]
            for path in generator.sample(found, generator.randint(1, 3)):
                content = bytearray(path.read_bytes())
                if generator.random() < 0.5:
                    del content[generator.randrange(len(content)) :]
                for _ in range(generator.randrange(20) if content else 0):
                    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
                path.write_bytes(content)
            with tier(left) as again:
                num_served += sum(served(again, chain(number)) for number in range(4))
                for number in range(4):
                    put(again, chain(number))
                assert [served(again, chain(number)) for number in range(4)] == [8] * 4
            check_quota(left)
    assert num_served > 20 * 8, "little of what was whole was found again"


@pytest.mark.parametrize(
    ("column", "value"), [("num_bytes", 1), ("num_bytes", "'many'"), ("used", "'now'"), ("used", 2**62), ("used", 1.5)]
)
def test_disk_tier_believes_no_number_of_its_index_that_cannot_be(
    tmp_path: Path, column: str, value: str | float
) -> None:
    """A size that was damaged let the folder grow past its quota; an age, made the newest file the first to go."""
    with tier(tmp_path) as opened:
        for number in range(3):
            put(opened, chain(number))
        size = opened.status().num_bytes // 3
    with sqlite3.connect(tmp_path / FILE_NAME) as index:
        index.execute(f"UPDATE bundles SET {column} = {value} WHERE used = 2")
    index.close()
    check_quota(tmp_path)
    with tier(tmp_path, quota_bytes=3 * size + size // 2) as opened:
        assert opened.status().num_bytes == 3 * size
        put(opened, chain(9))
        assert served(opened, chain(9)) == 8
        assert opened.status().num_bytes == 3 * size


def test_disk_tier_goes_on_with_the_index_that_another_process_began_anew(tmp_path: Path) -> None:
    """Its entries went into a database that had no name any more, and closing it took the new one's log away."""
    with tier(tmp_path) as stays:
        put(stays, chain(1))
        with tier(tmp_path) as renews:
            renews._folder.failed(sqlite3.DatabaseError("database disk image is malformed"))
            put(renews, chain(2))
            assert [served(stays, chain(number)) for number in (1, 2)] == [8, 8]
            put(stays, chain(3))
            stays._folder.failed(sqlite3.DatabaseError("noticed later"))
            assert [served(renews, chain(number)) for number in (1, 2, 3)] == [8, 8, 8]
            assert [one.status().trouble for one in (stays, renews)] == ["", ""]
        put(stays, chain(4))
        (index,) = tmp_path.glob("index*.sqlite")
        assert index.name != FILE_NAME
    check_quota(tmp_path)
    with tier(tmp_path) as opened:
        assert [served(opened, chain(number)) for number in (1, 2, 3, 4)] == [8] * 4


def test_disk_tier_goes_on_when_somebody_removes_its_index(tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        for path in tmp_path.glob("index*"):
            path.unlink()
        assert served(opened, chain(1)) == 8
        put(opened, chain(2))
        assert not opened.status().trouble
    check_quota(tmp_path)


def test_disk_tier_keeps_once_what_two_processes_write_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see that it is not there; one writes it whole, the other in two parts, which nobody would ever read."""
    names = chain(1)

    def as_the_other_does(bundle: Bundle, folder: Path, scratch: Path) -> tuple[str, int]:
        monkeypatch.setattr(disk_folder, "write_bundle", write_bundle)
        put(other, names)
        return write_bundle(bundle, folder, scratch)

    with tier(tmp_path) as one, tier(tmp_path) as other:
        for part in (names[:4], names[4:]):
            monkeypatch.setattr(disk_folder, "write_bundle", as_the_other_does)
            put(one, part)
        assert len(files(tmp_path)) == 1
        assert served(one, names) == 8
        assert one.status().num_bytes == files(tmp_path)[0].stat().st_size


def test_disk_tier_takes_what_another_process_adds_meanwhile_for_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One made room while another wrote as much: entries seemed to stay, and the index was thrown away."""
    with tier(tmp_path) as one, tier(tmp_path) as other:
        for number in range(5):
            put(one, chain(number))
        remove = DiskIndex.remove

        def meanwhile(index: DiskIndex, file: str) -> None:
            monkeypatch.setattr(DiskIndex, "remove", remove)
            remove(index, file)
            other._folder.quota_bytes = 10**7
            put(other, chain(8))

        monkeypatch.setattr(DiskIndex, "remove", meanwhile)
        put(one, chain(9))
        assert [path.name for path in tmp_path.glob("index*.sqlite")] == [FILE_NAME]
        assert [served(one, chain(number)) for number in (4, 8, 9)] == [8] * 3
        assert not one.status().trouble + other.status().trouble
    check_quota(tmp_path)


def killed_before_it_was_locked(folder: Path) -> None:
    (folder / "scratch-early").mkdir()


def killed_in_the_middle(folder: Path) -> None:
    (folder / "scratch-late").mkdir()
    (folder / "scratch-late" / "lock").touch()
    (folder / "scratch-late" / ("ab" * 32)).write_bytes(b"half a file")


@pytest.mark.parametrize("leave", [killed_before_it_was_locked, killed_in_the_middle])
def test_disk_tier_removes_the_scratch_folder_of_whoever_was_killed(
    tmp_path: Path, leave: Callable[[Path], None]
) -> None:
    with tier(tmp_path):
        leave(tmp_path)
        (alive,) = (path for path in tmp_path.glob("scratch-*") if path.name not in ("scratch-early", "scratch-late"))
        with tier(tmp_path):
            left = {path.name for path in tmp_path.glob("scratch-*")}
            assert len(left) == 2
            assert alive.name in left
    assert not list(tmp_path.glob("scratch-*"))


def test_disk_tier_does_not_wait_for_ever_for_a_process_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_scratch, "GATE_S", 0.05)
    with disk_scratch.gate(tmp_path), tier(tmp_path, NAMESPACE, QUOTA) as opened:
        assert "another process has held" in opened.status().trouble
        assert served(opened, chain(1)) == 0
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        assert served(opened, chain(1)) == 8
