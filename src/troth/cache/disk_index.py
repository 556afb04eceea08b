"""Which file of the disk tier holds which block, and which were used longest ago: one SQLite database for all.

Refuses to know what is in the files: an entry is a hint, ``disk_bundle.py`` proves it. Used by ``disk_folder.py`` under
its lock. No clock: what was used later has the larger number.

    folder/index.sqlite      the first
    folder/index-1.sqlite    the one that took its place when it was damaged, under a name of its own: processes that
                             still have the first one open see that it is gone, and never meet the new one's files
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from troth.cache.disk_bundle import FILE
from troth.cache.disk_names import BundleKind
from troth.contracts.prefix_cache import DiskCacheContents

FILE_NAME: Final = "index.sqlite"
_ANY_NAME: Final = re.compile(r"index(?:-(\d{1,9}))?\.sqlite", re.ASCII)
BUSY_S: Final = 5.0
"""How long another process may hold the database."""
_PER_QUERY: Final = 500
_MOST_USES: Final = 2**53
"""No folder comes near it; a damaged number does, and would keep its file for ever."""
_MOST_BLOCKS: Final = 2**24
"""A file's header could not name as many."""
IndexTrouble: Final = (sqlite3.Error, UnicodeDecodeError, TypeError, ValueError, OverflowError)
"""What any use may raise. The values of a damaged database have any type, and its messages are not always text."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS bundles (
    file TEXT PRIMARY KEY, namespace TEXT NOT NULL, kind TEXT NOT NULL, num_blocks INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON bundles (used);
CREATE TABLE IF NOT EXISTS blocks (
    kind TEXT NOT NULL, name BLOB NOT NULL, file TEXT NOT NULL REFERENCES bundles (file) ON DELETE CASCADE,
    position INTEGER NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_file ON blocks (file);
CREATE TABLE IF NOT EXISTS labels (namespace TEXT PRIMARY KEY, label TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (id INTEGER PRIMARY KEY, num_bytes INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS counted AFTER INSERT ON bundles
BEGIN UPDATE totals SET num_bytes = num_bytes + NEW.num_bytes; END;
CREATE TRIGGER IF NOT EXISTS uncounted AFTER DELETE ON bundles
BEGIN UPDATE totals SET num_bytes = num_bytes - OLD.num_bytes; END;
"""
"""The total is kept because each file written asks for it twice: to add up 4,000 files takes 2 ms."""
_COUNT_ANEW: Final = "INSERT OR REPLACE INTO totals SELECT 0, COALESCE(SUM(num_bytes), 0) FROM bundles"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a block lies."""

    file: str
    position: int


def newest_generation(folder: Path) -> int | None:
    """Which database is in force; None: there is none."""
    found = (_ANY_NAME.fullmatch(path.name) for path in folder.glob("index*.sqlite"))
    return max((int(match[1] or 0) for match in found if match), default=None)


def remove_generations(folder: Path, before: int) -> None:
    """Remove the databases that another one took the place of. Raises OSError."""
    for path in folder.glob("index*.sqlite"):
        match = _ANY_NAME.fullmatch(path.name)
        if match and int(match[1] or 0) < before:
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)


class DiskIndex:
    """One connection. Every method may raise ``IndexTrouble``.

    Args:
        folder: where the database is, or is made.
        generation: which one.
    """

    def __init__(self, folder: Path, generation: int = 0) -> None:
        self._path = folder / (f"index-{generation}.sqlite" if generation else FILE_NAME)
        self._db = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            if self._db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("the index is damaged")
            # A power cut may lose the newest entries; their files are found again when the tier is opened.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            if not _definitions(self._db) <= _our_definitions():
                raise sqlite3.DatabaseError("the index has tables that are not ours")
            self._db.executescript(_SCHEMA)
            self._require_numbers()
            self._db.execute(_COUNT_ANEW)
        except IndexTrouble:
            self._db.close()
            raise

    @property
    def is_there(self) -> bool:
        """Whether the database is still what others find, or another process began a new one."""
        return self._path.exists()

    def close(self) -> None:
        """Let the database go."""
        self._db.close()

    def find(self, kind: BundleKind, names: Sequence[bytes]) -> dict[bytes, Location]:
        """Where those of ``names`` lie that are listed."""
        found: dict[bytes, Location] = {}
        for at in range(0, len(names), _PER_QUERY):
            asked = names[at : at + _PER_QUERY]
            marks = ",".join("?" * len(asked))
            rows = self._db.execute(
                f"SELECT name, file, position FROM blocks WHERE kind = ? AND name IN ({marks})", (kind, *asked)
            )
            found.update((bytes(name), Location(_file(file), _position(position))) for name, file, position in rows)
        return found

    def files_of(self, names: Sequence[bytes]) -> set[str]:
        """Every file that holds anything of these blocks, of whatever kind."""
        found: set[str] = set()
        for at in range(0, len(names), _PER_QUERY):
            asked = names[at : at + _PER_QUERY]
            marks = ",".join("?" * len(asked))
            rows = self._db.execute(f"SELECT DISTINCT file FROM blocks WHERE name IN ({marks})", asked)
            found.update(_file(file) for (file,) in rows)
        return found

    def add(self, kind: BundleKind, namespace: str, names: Sequence[bytes], file: str, num_bytes: int) -> bool:
        """List a file; blocks that another one holds already stay where they are.

        Returns:
            Whether anything lies there now; if not, it is not listed.
        """
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR IGNORE INTO bundles "
                "VALUES (?, ?, ?, ?, ?, 1 + COALESCE((SELECT MAX(used) FROM bundles), 0))",
                (file, namespace, kind, len(names), num_bytes),
            )
            self._db.executemany(
                "INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?)",
                [(kind, name, file, position) for position, name in enumerate(names)],
            )
            is_needed = self._db.execute("SELECT 1 FROM blocks WHERE file = ?", (file,)).fetchone() is not None
            if not is_needed:
                self._db.execute("DELETE FROM bundles WHERE file = ?", (file,))
        return is_needed

    def touch(self, files: Iterable[str]) -> None:
        """These were used just now, the first of them last: a chain loses its end before its beginning."""
        used = list(files)
        if not used:
            return
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for file in reversed(used):
                self._db.execute(
                    "UPDATE bundles SET used = 1 + (SELECT MAX(used) FROM bundles) WHERE file = ?", (file,)
                )

    def remove(self, file: str) -> None:
        """A file is gone, or about to be."""
        with self._db:
            self._db.execute("DELETE FROM bundles WHERE file = ?", (file,))

    def lists(self, file: str) -> bool:
        """Whether a file is listed."""
        return self._db.execute("SELECT 1 FROM bundles WHERE file = ?", (file,)).fetchone() is not None

    def places(self, file: str) -> bool:
        """Whether any block is said to lie in a file. Every row is looked at: an index may be what is damaged."""
        return self._db.execute("SELECT 1 FROM blocks WHERE +file = ?", (file,)).fetchone() is not None

    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return int(self._db.execute("SELECT SUM(num_bytes) FROM totals").fetchone()[0])

    def oldest(self) -> str | None:
        """The file used longest ago."""
        row = self._db.execute("SELECT file FROM bundles ORDER BY used LIMIT 1").fetchone()
        return None if row is None else _file(row[0])

    def files(self, namespace: str | None = None) -> dict[str, int]:
        """Every listed file with its bytes, of one namespace or of all."""
        rows = self._db.execute("SELECT file, num_bytes FROM bundles WHERE ?1 IS NULL OR namespace = ?1", (namespace,))
        return {_file(file): num_bytes for file, num_bytes in rows}

    def label(self, namespace: str, label: str) -> None:
        """Call a namespace so, for people."""
        self._db.execute("INSERT OR REPLACE INTO labels VALUES (?, ?)", (namespace, label))

    def contents(self) -> list[DiskCacheContents]:
        """What is listed, by namespace and kind, in order."""
        rows = self._db.execute(
            "SELECT namespace, COALESCE(label, ''), kind, COUNT(*), SUM(num_blocks), SUM(num_bytes) "
            "FROM bundles LEFT JOIN labels USING (namespace) GROUP BY namespace, kind ORDER BY namespace, kind"
        )
        names = ("namespace", "label", "kind", "num_files", "num_blocks", "num_bytes")
        return [DiskCacheContents(**dict(zip(names, row, strict=True))) for row in rows]

    def _require_numbers(self) -> None:
        """Raise where there is something else: sums and orders would be wrong from then on, without any error."""
        wrong = self._db.execute(
            "SELECT file FROM bundles WHERE typeof(used) <> 'integer' OR used NOT BETWEEN 0 AND ? "
            "OR typeof(num_bytes) <> 'integer' OR num_bytes < 0 "
            "OR typeof(num_blocks) <> 'integer' OR num_blocks NOT BETWEEN 1 AND ? LIMIT 1",
            (_MOST_USES, _MOST_BLOCKS),
        ).fetchone()
        if wrong is not None:
            raise sqlite3.DatabaseError(f"the index has numbers for {str(wrong[0])[:80]!r} that cannot be")


def _definitions(db: sqlite3.Connection) -> set[tuple[object, ...]]:
    """Tables, indexes and whatever else a database says it has."""
    return set(db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


@cache
def _our_definitions() -> frozenset[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(_SCHEMA)
        return frozenset(_definitions(db))


def _file(value: object) -> str:
    """A file as ``disk_bundle.py`` names them: what a damaged database says is neither opened nor removed."""
    if not isinstance(value, str) or not FILE.fullmatch(value):
        raise sqlite3.DatabaseError(f"the index names a file {str(value)[:80]!r}")
    return value


def _position(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise sqlite3.DatabaseError(f"the index has a block at place {str(value)[:80]!r} of a file")
    return value
