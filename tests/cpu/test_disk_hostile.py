"""A cache folder that somebody filled on purpose: whatever lies there, the tier serves what is right and goes on.

Each of these once ended an engine, made it wait for ever, or ended the cache.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.cpu.disk_blocks import NAMESPACE, chain, tensors_of
from tests.cpu.test_disk_tier import files, put, served, tier
from troth.cache.disk_folder import DiskFolder
from troth.cache.disk_index import FILE_NAME, DiskIndex

OTHER = chain(3)
"""Of the text that hostile files say they hold."""
WORK = ("SELECT", "INSERT", "UPDATE", "DELETE")


def place(folder: Path) -> Path:
    """Where a bundle could lie."""
    path = folder / "ab" / f"ab{'cd' * 31}.safetensors"
    path.parent.mkdir()
    return path


def bundle(folder: Path, header: bytes, data: bytes = b"") -> None:
    """A file whose name is right, whatever its header says."""
    content = len(header).to_bytes(8, "little") + header + data
    digest = sha256(content).hexdigest()
    path = folder / digest[:2] / f"{digest}.safetensors"
    path.parent.mkdir()
    path.write_bytes(content)


def shaped(folder: Path, shape: list[int]) -> None:
    names = b"".join(OTHER).hex()
    metadata = {"format": "troth-cache-1", "kind": "kv0", "namespace": NAMESPACE, "names": names}
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    bundle(folder, json.dumps({"__metadata__": metadata, "0.k": tensor}).encode())


def half_a_character(folder: Path) -> None:
    names = b"".join(OTHER).hex()
    content = save(tensors_of(OTHER), {"format": "troth-cache-1", "kind": "kv0", "namespace": "??", "names": names})
    length = int.from_bytes(content[:8], "little")
    bundle(folder, content[8 : 8 + length].replace(b"??", b"\\ud800"), content[8 + length :])


def other_tables(folder: Path) -> None:
    with sqlite3.connect(folder / FILE_NAME) as index:
        index.execute("CREATE TABLE bundles (file)")
    index.close()


def renamed_column(folder: Path) -> None:
    DiskIndex(folder).close()
    with sqlite3.connect(folder / FILE_NAME) as index:
        index.execute("ALTER TABLE blocks RENAME COLUMN position TO pqsition")
    index.close()


def trigger(folder: Path) -> None:
    DiskIndex(folder).close()
    with sqlite3.connect(folder / FILE_NAME) as index:
        index.execute("CREATE TRIGGER no BEFORE INSERT ON blocks BEGIN SELECT RAISE(ABORT, 'no'); END")
    index.close()


def locked_by_a_pipe(folder: Path) -> None:
    (folder / "scratch-x").mkdir()
    os.mkfifo(folder / "scratch-x" / "lock")


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda folder: os.mkfifo(place(folder)),
    "a folder": lambda folder: place(folder).mkdir(),
    "a device": lambda folder: place(folder).symlink_to("/dev/zero"),
    "a header nested deeply": lambda folder: bundle(folder, b'{"__metadata__":' + b"[" * 100_000),
    "a namespace that is no text": half_a_character,
    "a shape whose strides overflow": lambda folder: shaped(folder, [8, 0, 2**62, 2**62]),
    "a shape that is no integer": lambda folder: shaped(folder, [8, 0, 2**64 - 1]),
    "an index with other tables": other_tables,
    "an index with another column": renamed_column,
    "an index that refuses": trigger,
    "a scratch folder that a pipe locks": locked_by_a_pipe,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_disk_tier_goes_on_whatever_lies_in_its_folder(tmp_path: Path, what: str) -> None:
    HOSTILE[what](tmp_path)
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        assert (served(opened, chain(1)), served(opened, OTHER)) == (8, 0)
        assert not opened.status().trouble
    with tier(tmp_path) as again:
        assert served(again, chain(1)) == 8
        assert again.status().num_bytes == sum(path.lstat().st_size for path in files(tmp_path) if is_own(path))


def is_own(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_disk_tier_does_not_wait_for_what_took_the_place_of_its_files(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        (file,) = files(tmp_path)
        file.unlink()
        make(file)
        assert served(opened, chain(1)) == 0
        put(opened, chain(1))
        assert served(opened, chain(1)) == 8
        assert (opened.status().num_damaged, opened.status().trouble) == (1, "")


def test_disk_tier_writes_through_no_link(tmp_path: Path) -> None:
    """A lock that was a link had the file it names cut off, and a scratch folder's got a lock in somebody's folder."""
    precious, theirs, folder = tmp_path / "precious", tmp_path / "theirs", tmp_path / "cache"
    precious.write_text("mine")
    theirs.mkdir()
    folder.mkdir()
    (folder / "scratch-x").symlink_to(theirs)
    with tier(folder) as opened:
        assert not opened.status().trouble
    assert list(theirs.iterdir()) == []
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(precious)
    with tier(folder) as opened:
        assert "cannot be used" in opened.status().trouble
    assert precious.read_text() == "mine"


def test_disk_tier_does_not_wait_for_a_lock_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with tier(tmp_path) as opened:
        assert "is not a regular file" in opened.status().trouble


def test_disk_tier_removes_files_whose_tensors_are_of_another_shape(tmp_path: Path) -> None:
    """They were found again with every request for their text, and kept it from ever being written."""
    with tier(tmp_path) as opened:
        assert opened.offer("kv0", chain(1), {"0.k": torch.ones(8, 3)})
        assert opened.flush()
        assert opened.read("kv0", chain(1), lambda tensors: tensors["0.k"].shape[1:] == (4,)) == []
        assert not opened.held("kv0", chain(1))
        assert (files(tmp_path), opened.status().num_damaged) == ([], 1)


def test_disk_index_that_counts_blocks_that_cannot_be_is_made_anew(tmp_path: Path) -> None:
    """Their sum was no integer any more: listing what is kept ended the cache."""
    with tier(tmp_path) as opened:
        put(opened, chain(1))
        put(opened, chain(2))
    with sqlite3.connect(tmp_path / FILE_NAME) as index:
        index.execute(f"UPDATE bundles SET num_blocks = {2**63 - 1}")
    index.close()
    opened_folder = DiskFolder(tmp_path, quota_bytes=10**7)
    assert [one.num_blocks for one in opened_folder.contents()] == [16]
    assert not opened_folder.trouble
    opened_folder.close()


def test_disk_index_counts_bytes_without_adding_up_every_file(tmp_path: Path) -> None:
    """Each file written added up all others, twice: with 4,000 of them it took 7 ms, and looking up waited for that."""
    index = DiskIndex(tmp_path)
    digests = [sha256(str(number).encode()).hexdigest() for number in range(40)]
    names = [f"{digest[:2]}/{digest}.safetensors" for digest in digests]
    for number, name in enumerate(names):
        index.add("kv0", NAMESPACE, [digests[number].encode()], name, 1 + number)
    asked: list[str] = []
    index._db.set_trace_callback(asked.append)
    index.add("kv0", NAMESPACE, [digests[0].encode()], names[0], 1)
    index.touch(names[:2])
    index.remove(names[0])
    assert index.total_bytes() == sum(range(2, 41))
    assert index.oldest() == names[2]
    index._db.set_trace_callback(None)
    looks = [row for query in asked if query.split()[0] in WORK for row in plan_of(index, query)]
    assert looks
    assert not [look for look in looks if look.startswith(("SCAN bundles", "SCAN blocks")) and "USING" not in look]
    index._db.execute("UPDATE totals SET num_bytes = 1")
    index.close()
    again = DiskIndex(tmp_path)
    assert again.total_bytes() == sum(range(2, 41)), "what was damaged is counted anew"
    again.close()


def plan_of(index: DiskIndex, query: str) -> list[str]:
    return [str(row[3]) for row in index._db.execute(f"EXPLAIN QUERY PLAN {query}")]


def test_disk_index_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    """Before totals were kept: making it anew would lose what was used when."""
    with tier(tmp_path) as opened:
        put(opened, chain(1))
    with sqlite3.connect(tmp_path / FILE_NAME) as index:
        index.executescript("DROP TRIGGER counted; DROP TRIGGER uncounted; DROP TABLE totals")
    index.close()
    with tier(tmp_path) as opened:
        put(opened, chain(2))
        assert [served(opened, chain(number)) for number in (1, 2)] == [8, 8]
        assert opened.status().num_bytes == sum(path.stat().st_size for path in files(tmp_path))
    assert [path.name for path in tmp_path.glob("index*.sqlite")] == [FILE_NAME]
