"""Which file of the disk tier holds which block, and which were used longest ago: one SQLite database for all.

Refuses to know what is in the files: an entry is a hint, ``disk_segment.py`` proves it. Used by ``disk_tier.py``, under
its lock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from troth.cache.disk_segment import SegmentKind

FILE_NAME: Final = "index.sqlite"
BUSY_S: Final = 5.0
"""How long another process may hold the database."""
_PER_QUERY: Final = 500
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS segments (
    file TEXT PRIMARY KEY, namespace TEXT NOT NULL, num_bytes INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON segments (used);
CREATE TABLE IF NOT EXISTS blocks (
    kind TEXT NOT NULL, name BLOB NOT NULL, file TEXT NOT NULL REFERENCES segments (file) ON DELETE CASCADE,
    position INTEGER NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_file ON blocks (file);
"""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a block lies."""

    file: str
    position: int


class DiskIndex:
    """One connection. Every method may raise sqlite3.Error."""

    def __init__(self, folder: Path) -> None:
        self._db = sqlite3.connect(folder / FILE_NAME, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            if self._db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("the index is damaged")
            # A power cut may lose the newest entries; their files are found again when the tier is opened.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error:
            self._db.close()
            raise

    def close(self) -> None:
        """Let the database go."""
        self._db.close()

    def find(self, kind: SegmentKind, names: Sequence[bytes]) -> list[Location]:
        """Where the longest listed beginning of ``names`` lies, one location per name."""
        found: list[Location] = []
        for at in range(0, len(names), _PER_QUERY):
            asked = names[at : at + _PER_QUERY]
            marks = ",".join("?" * len(asked))
            rows = self._db.execute(
                f"SELECT name, file, position FROM blocks WHERE kind = ? AND name IN ({marks})", (kind, *asked)
            )
            places = {bytes(name): Location(file, position) for name, file, position in rows}
            for name in asked:
                if name not in places:
                    return found
                found.append(places[name])
        return found

    def add(self, kind: SegmentKind, namespace: str, names: Sequence[bytes], file: str, num_bytes: int) -> None:
        """List a file; blocks that another one holds already stay where they are."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "INSERT OR IGNORE INTO segments SELECT ?, ?, ?, 1 + COALESCE(MAX(used), 0) FROM segments",
                (file, namespace, num_bytes),
            )
            self._db.executemany(
                "INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?)",
                [(kind, name, file, position) for position, name in enumerate(names)],
            )

    def touch(self, files: Iterable[str]) -> None:
        """These were used just now, the first of them last: a chain loses its end before its beginning."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for file in reversed(list(files)):
                self._db.execute(
                    "UPDATE segments SET used = 1 + (SELECT MAX(used) FROM segments) WHERE file = ?", (file,)
                )

    def remove(self, file: str) -> None:
        """A file is gone, or about to be."""
        with self._db:
            self._db.execute("DELETE FROM segments WHERE file = ?", (file,))

    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return int(self._db.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM segments").fetchone()[0])

    def oldest(self) -> str | None:
        """The file used longest ago."""
        row = self._db.execute("SELECT file FROM segments ORDER BY used LIMIT 1").fetchone()
        return None if row is None else str(row[0])

    def files(self) -> set[str]:
        """Every listed file."""
        return {str(file) for (file,) in self._db.execute("SELECT file FROM segments")}
