"""The disk tier: what comes back is what was written or nothing, whatever happened to the folder in between."""

from __future__ import annotations

import errno
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.cpu.disk_blocks import NAMESPACE, QUOTA, chain, check_spans, tensors_of
from troth.cache import disk_folder, disk_tier
from troth.cache.disk_index import FILE_NAME, DiskIndex
from troth.cache.disk_names import block_names, cache_namespace
from troth.cache.disk_tier import DiskTier


@contextmanager
def tier(folder: Path, namespace: str = NAMESPACE, quota_bytes: int | None = QUOTA) -> Iterator[DiskTier]:
    opened = DiskTier(folder, namespace, quota_bytes=quota_bytes)
    try:
        yield opened
    finally:
        opened.close()


def put(opened: DiskTier, names: list[bytes], kind: str = "kv0") -> None:
    assert opened.offer(kind, names, tensors_of(names))
    assert opened.flush()


def served(opened: DiskTier, names: list[bytes], kind: str = "kv0") -> int:
    """How many blocks came back, all of them right."""
    return check_spans(names, opened.read(kind, names))


def check_quota(folder: Path) -> None:
    """Whoever comes next knows of every file, and counts its bytes."""
    with tier(folder) as opened:
        assert opened.status().num_bytes == sum(path.stat().st_size for path in files(folder)) <= QUOTA
        assert not opened.status().trouble


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_disk_tier_serves_after_a_restart_what_was_written_before(tmp_path: Path) -> None:
    names = chain(1)
    with tier(tmp_path) as first:
        put(first, names[:4])
        put(first, names[4:])
        assert served(first, names) == 8
    with tier(tmp_path) as second:
        assert second.held("kv0", names) == frozenset(range(8))
        assert served(second, names) == 8
        assert served(second, chain(2)) == 0
        assert served(second, [*names[:3], b"\0" * 32, *names[3:]]) == 3
        assert second.status().num_bytes == sum(path.stat().st_size for path in files(tmp_path))


def test_disk_tier_writes_known_blocks_once(tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        put(opened, chain(1))
        assert opened.status().num_written == 1


def test_disk_tier_keeps_states_and_namespaces_apart(tmp_path: Path) -> None:
    names = chain(1)
    with tier(tmp_path) as opened:
        put(opened, names)
        assert served(opened, names[-1:], "state") == 0
        put(opened, names[-1:], "state")
        assert served(opened, names[-1:], "state") == 1
    with tier(tmp_path, cache_namespace(artifact="b", dtype="float32", kv_dtype="float32", compute="cpu")) as other:
        assert served(other, names) == 0


def test_block_names_depend_on_all_that_is_before(tmp_path: Path) -> None:
    ids = list(range(40))
    names = block_names("n", "", ids)
    assert len(names) == 2
    assert block_names("n", "", [*ids, *range(8)])[:2] == names
    for other in (block_names("m", "", ids), block_names("n", "s", ids), block_names("n", "", [9, *ids[1:]])):
        assert not set(other) & set(names)
    assert block_names("n", "", [*ids[:20], 9, *ids[21:]])[0] == names[0]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_disk_tier_removes_a_damaged_file_and_misses(tmp_path: Path, damage: str) -> None:
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        put(opened, chain(2))
    # Another process still lists it when it is hurt.
    with tier(tmp_path) as opened:
        assert all(len(opened.held("kv0", chain(number))) == 8 for number in (1, 2))
        hurt = files(tmp_path)[0]
        content = hurt.read_bytes()
        if damage == "gone":
            hurt.unlink()
        else:
            middle = len(content) // 2
            flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            hurt.write_bytes({"flip": flipped, "cut": content[:middle], "empty": b""}[damage])
        assert sorted(served(opened, chain(number)) for number in (1, 2)) == [0, 8]
        status = opened.status()
        assert (status.num_damaged, status.trouble) == (1, "")
        assert status.num_bytes == sum(path.stat().st_size for path in files(tmp_path))
        assert len(files(tmp_path)) == 1
        for number in (1, 2):
            put(opened, chain(number))
            assert served(opened, chain(number)) == 8


def test_disk_tier_survives_flips_anywhere_in_its_index(tmp_path: Path) -> None:
    for seed in range(12):
        folder = tmp_path / str(seed)
        with tier(folder) as opened:
            for number in range(3):
                put(opened, chain(number))
        generator = random.Random(seed)
        index = folder / FILE_NAME
        content = bytearray(index.read_bytes())
        for _ in range(20):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        index.write_bytes(content)
        with tier(folder) as opened:
            for number in range(3):
                served(opened, chain(number))
            for number in range(3):
                opened.offer("kv0", chain(number), tensors_of(chain(number)))
            opened.flush()
            for number in range(3):
                served(opened, chain(number))
        check_quota(folder)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("file", "ab/a\0b"),
        ("file", "../../elsewhere"),
        ("file", f"ab/{'ab' * 32}.safetensors"),
        ("file", 7),
        ("position", -126),
        ("position", float("inf")),
        ("position", "abc"),
    ],
)
def test_disk_tier_makes_an_index_anew_that_says_what_cannot_be(
    tmp_path: Path, column: str, value: str | float
) -> None:
    """A file's name with a NUL in it ended the engine, and so did a place before the first; a name that no file has
    kept its block from ever being served, or written, again.
    """
    names = chain(1, 128)
    with tier(tmp_path, quota_bytes=10**7) as opened:
        put(opened, names)
        with sqlite3.connect(tmp_path / FILE_NAME) as index:
            index.execute(f"UPDATE blocks SET {column} = ? WHERE position = 2", (value,))
        index.close()
        assert served(opened, names[2:]) in (0, 126)
        assert served(opened, names) == 128
        assert not opened.status().trouble


def test_disk_tier_opened_while_another_process_writes_takes_nothing_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files were looked for before the index was read: one that was written between the two was dropped from it."""
    with tier(tmp_path) as writes:
        put(writes, chain(1))
        read, chains = DiskIndex.files, iter([chain(2), chain(3)])

        def read_while_it_writes(index: DiskIndex, namespace: str | None = None) -> dict[str, int]:
            put(writes, next(chains))
            return read(index, namespace)

        with monkeypatch.context() as patched:
            patched.setattr(DiskIndex, "files", read_while_it_writes)
            with tier(tmp_path) as second:
                patched.undo()
                assert [served(second, chain(number)) for number in (1, 2, 3)] == [8, 8, 8]
                put(second, chain(4))
        assert served(writes, chain(4)) == 8


def test_disk_tier_leaves_files_of_others_in_its_folder_alone(tmp_path: Path) -> None:
    """Somebody who named a folder of models lost those in folders of two letters: they were no bundles."""
    others = [tmp_path / "7b" / "model.safetensors", tmp_path / "ab" / f"{'cd' * 32}.safetensors"]
    for other in others:
        other.parent.mkdir()
        other.write_bytes(b"weights")
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        assert served(opened, chain(1)) == 8
    with tier(tmp_path) as again:
        assert served(again, chain(1)) == 8
        assert not again.status().num_damaged
    assert [other.read_bytes() for other in others] == [b"weights"] * 2


def test_disk_tier_makes_a_lost_index_anew_from_its_files(tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        put(opened, chain(1))
    (tmp_path / FILE_NAME).write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    with tier(tmp_path) as opened:
        assert served(opened, chain(1)) == 8
    (renewed,) = tmp_path.glob("index*.sqlite")
    assert renewed.name != FILE_NAME, "processes that have the lost one open must not meet files of the new one"
    renewed.unlink()
    with tier(tmp_path) as opened:
        assert served(opened, chain(1)) == 8


def test_disk_tier_keeps_its_quota_and_what_was_used_last(tmp_path: Path) -> None:
    with tier(tmp_path, quota_bytes=10**7) as opened:
        for number in range(6):
            put(opened, chain(number))
        size = opened.status().num_bytes // 6
    with tier(tmp_path, quota_bytes=3 * size + size // 2) as opened:
        assert opened.status().num_evicted == 3
        assert [served(opened, chain(number)) for number in range(6)] == [0, 0, 0, 8, 8, 8]
        served(opened, chain(3))
        put(opened, chain(9))
        assert [served(opened, chain(number)) for number in (3, 4, 5, 9)] == [8, 0, 8, 8]
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 3 * size + size // 2


def test_disk_tier_loses_the_end_of_a_chain_before_its_beginning(tmp_path: Path) -> None:
    names = chain(1, 16)
    with tier(tmp_path) as opened:
        for at in range(0, 16, 4):
            put(opened, names[at : at + 4])
        served(opened, names)
        size = opened.status().num_bytes // 4
    with tier(tmp_path, quota_bytes=2 * size + size // 2) as opened:
        assert served(opened, names) == 8


def test_disk_tier_is_shared_by_processes_on_one_folder(tmp_path: Path) -> None:
    with tier(tmp_path) as one, tier(tmp_path) as other:
        put(one, chain(1))
        assert served(other, chain(1)) == 8
        put(other, chain(2))
        put(other, chain(1))
        assert served(one, chain(2)) == 8
        assert len(files(tmp_path)) == 2
        assert len(list(tmp_path.glob("scratch-*"))) == 2
    assert not list(tmp_path.glob("scratch-*"))


def test_disk_tier_stops_writing_on_a_full_disk_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tier(tmp_path) as opened:
        put(opened, chain(1))

        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(disk_folder, "write_bundle", full)
        opened.offer("kv0", chain(2), tensors_of(chain(2)))
        opened.flush()
        assert "No space left" in opened.status().trouble
        assert served(opened, chain(1)) == 8
        assert not opened.offer("kv0", chain(3), tensors_of(chain(3)))


def test_disk_tier_in_a_folder_that_cannot_be_made_holds_nothing_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with tier(tmp_path / "file" / "cache") as opened:
        assert not opened.offer("kv0", chain(1), tensors_of(chain(1)))
        assert served(opened, chain(1)) == 0
        assert "cannot be used" in opened.status().trouble


def test_disk_tier_drops_what_its_queue_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "QUEUE_BYTES", 1000)
    with tier(tmp_path) as opened:
        assert not opened.offer("kv0", chain(1), tensors_of(chain(1)))
        assert opened.status().num_dropped == 1


def test_disk_tier_survives_being_killed_at_any_moment(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cpu.disk_killer", str(tmp_path / "cache"), "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "200 kills" in done.stdout
    assert " 0 blocks served" not in done.stdout, "or nothing was proved"


def test_disk_tier_forgets_what_is_withdrawn_and_what_waits_behind_it(tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        opened.offer("kv0", chain(2), tensors_of(chain(2)))
        opened.withdraw([chain(1)[3], *chain(2)])
        assert opened.flush()
        assert [served(opened, chain(number)) for number in (1, 2)] == [0, 0]
        assert not files(tmp_path)
        put(opened, chain(1))
        assert served(opened, chain(1)) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_disk_tier_keeps_nothing_that_is_not_finite(tmp_path: Path, dtype: torch.dtype, value: str) -> None:
    with tier(tmp_path) as opened:
        tensors = {key: tensor.to(dtype) for key, tensor in tensors_of(chain(1)).items()}
        tensors["0.k"][0, 0] = torch.finfo(dtype).min
        bad = {**tensors, "0.v": tensors["0.v"].clone()}
        bad["0.v"][2, 5] = float(value)
        assert opened.offer("kv0", chain(1), bad)
        assert opened.flush()
        assert opened.held("kv0", chain(1)) == frozenset()
        assert opened.status().num_dropped == 1
        assert opened.offer("kv0", chain(1), tensors)
        assert opened.flush()
        assert len(opened.held("kv0", chain(1))) == 8


def test_disk_tier_counts_a_file_that_another_process_gave_up_as_a_miss(tmp_path: Path) -> None:
    with tier(tmp_path) as one, tier(tmp_path, quota_bytes=0) as other:
        put(one, chain(1))
        other.measure()
        assert served(other, chain(1)) == 8
        with tier(tmp_path, quota_bytes=0):
            pass  # opening it gives up what is over its quota
        assert served(one, chain(1)) == 0
        assert one.status().num_damaged == 0


def test_disk_tier_measures_how_fast_it_reads(tmp_path: Path) -> None:
    with tier(tmp_path) as opened:
        assert opened.speed.seconds(10**9, 0) == 0
        opened.measure()
        assert opened.status().bytes_per_s > 0
        assert opened.speed.seconds(10**9, 1) > 0
        assert not list(tmp_path.glob("scratch-*/probe"))


def test_disk_tier_folder_is_its_owners_alone(tmp_path: Path) -> None:
    with tier(tmp_path / "cache"):
        assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
