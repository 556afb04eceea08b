"""One folder of the disk tier: its index, its quota and its files, shared with other processes.

Refuses to know queues and threads (``disk_tier.py``). Whatever goes wrong ends in a miss and in a sentence,
``trouble``, never in an error.

    folder/index.sqlite           which file holds which block (``disk_index.py``)
    folder/ab/ab12...safetensors  the files, named after their content (``disk_bundle.py``)
    folder/scratch-*/             what a process is writing (``disk_scratch.py``)
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from troth.cache.disk_bundle import (
    FILE,
    SUFFIX,
    Bundle,
    DamagedBundle,
    describe_bundle,
    read_bundle,
    write_bundle,
)
from troth.cache.disk_index import DiskIndex, IndexTrouble, Location, newest_generation, remove_generations
from troth.cache.disk_names import BundleKind
from troth.cache.disk_scratch import Scratch, gate
from troth.cache.regular_file import regular_bytes
from troth.config.disk_quota import default_quota
from troth.contracts.prefix_cache import DiskCacheContents

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")

_PRIVATE: Final = 0o700
"""What is kept says what was talked about: nobody else may read it."""


class DiskFolder:
    """One process's way to the folder. Thread-safe.

    Args:
        folder: made if it is not there, for this user alone.
        quota_bytes: most bytes of all files; None: the default.

    A folder that cannot be used holds nothing, and ``trouble`` says why.
    """

    def __init__(self, folder: Path, *, quota_bytes: int | None = None) -> None:
        self.path = folder
        self.quota_bytes = 0
        self.num_bytes = 0
        """Of all files, as of the last change made here."""
        self.free_bytes = 0
        """Of the disk, as of the last file written here."""
        self.trouble = ""
        """Why nothing is written any more; empty while all is well."""
        self.counts: Counter[str] = Counter()
        """written, damaged, evicted: files."""
        self._lock = threading.Lock()
        """Guards the connection. Never held while a file's content is read or written."""
        self._index: DiskIndex | None = None
        self._generation = 0
        """Of the index that is, or was last, in use."""
        self._scratch: Scratch | None = None
        try:
            self._open(quota_bytes)
        except (OSError, sqlite3.OperationalError) as error:
            self.stop_writing(f"the cache folder {folder} cannot be used: {error}")
        except IndexTrouble as error:
            self._lose_index(error)

    @property
    def scratch(self) -> Path | None:
        """Where to write before a file appears; None when nothing can be written."""
        return self._scratch.path if self._scratch is not None else None

    def find(self, kind: BundleKind, names: Sequence[bytes]) -> dict[bytes, Location]:
        """Where those of ``names`` lie that are listed. Their files may yet prove damaged."""
        return self._ask(lambda index: index.find(kind, names), {})

    def touch(self, files: Iterable[str]) -> None:
        """These were used just now, the first of them last."""
        self._ask(lambda index: index.touch(files), None)

    def label(self, namespace: str, label: str) -> None:
        """Call a namespace so, for people."""
        self._ask(lambda index: index.label(namespace, label), None)

    def contents(self) -> list[DiskCacheContents]:
        """What is listed, by namespace and kind."""
        return self._ask(lambda index: index.contents(), [])

    def files(self) -> list[str]:
        """Every listed file."""
        return self._ask(lambda index: sorted(index.files()), [])

    def read(self, file: str) -> Bundle | None:
        """A file that is what it was when it was written; one that is not is removed."""
        try:
            return read_bundle(self.path, file)
        except DamagedBundle as error:
            self.remove_damaged(file, str(error))
            return None

    def remove_damaged(self, file: str, why: str) -> None:
        """A file is not what it should be; one that was given up meanwhile is only gone."""

        def remove(index: DiskIndex) -> None:
            if index.lists(file):
                _log.warning("removing a damaged file of the disk cache: %s", why)
                self.counts["damaged"] += 1
                self._drop(index, file)
            elif index.places(file):
                raise sqlite3.DatabaseError(f"the index has blocks in {file}, which it does not list")

        self._ask(remove, None)

    def remove_blocks(self, names: Sequence[bytes]) -> None:
        """Forget these blocks, and what shares a file with them."""

        def remove(index: DiskIndex) -> None:
            for file in index.files_of(names):
                self._drop(index, file)

        self._ask(remove, None)

    def clear(self, namespace: str | None = None) -> int:
        """Remove every file, of one namespace or of all; how many there were."""

        def remove(index: DiskIndex) -> int:
            files = index.files(namespace)
            for file in files:
                self._drop(index, file)
            return len(files)

        return self._ask(remove, 0)

    def write(self, bundle: Bundle) -> None:
        """Keep a bundle, unless all of it is known. Raises OSError or IndexTrouble."""
        with self._lock:
            index = self._current_index()
            if index is None or self._scratch is None or bundle.num_bytes > self.quota_bytes:
                return
            if len(index.find(bundle.kind, bundle.names)) == len(bundle.names):
                return
            self._evict(index, bundle.num_bytes)
            scratch = self._scratch.path
        # Without the lock: the slow part, which no lookup should wait for.
        file, num_bytes = write_bundle(bundle, self.path, scratch)
        with self._lock:
            index = self._current_index()
            if index is not None:
                self._list(index, bundle, file, num_bytes)
                self.counts["written"] += 1
                self.free_bytes = shutil.disk_usage(self.path).free
                self._evict(index, 0)

    def stop_writing(self, why: str) -> None:
        """Say so, once, and only read from now on."""
        if not self.trouble:
            _log.warning("the disk cache writes nothing more: %s", why)
        self.trouble = why

    def failed(self, error: Exception) -> None:
        """The index failed while it was written to."""
        with self._lock:
            self._lose_index(error)

    def close(self) -> None:
        """Let the folder go. Idempotent."""
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None
            if self._scratch is not None:
                self._scratch.close()
                self._scratch = None

    def _ask(self, question: Callable[[DiskIndex], _Found], without: _Found) -> _Found:
        """What the index answers; ``without`` when there is none, or it fails."""
        with self._lock:
            try:
                index = self._current_index()
                return without if index is None else question(index)
            except (OSError, *IndexTrouble) as error:
                self._lose_index(error)
                return without

    def _open(self, quota_bytes: int | None) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
        with gate(self.path):
            self._scratch = Scratch(self.path)
            self._generation = newest_generation(self.path) or 0
            try:
                index = self._index = DiskIndex(self.path, self._generation)
                self._compare(index)
            except IndexTrouble as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                index = self._renew_index()
        used, self.free_bytes = index.total_bytes(), shutil.disk_usage(self.path).free
        self.quota_bytes = default_quota(self.free_bytes, used) if quota_bytes is None else quota_bytes
        self._evict(index, 0)

    def _current_index(self) -> DiskIndex | None:
        """The index that all processes use: one of them may have begun it anew."""
        if self._index is not None and not self._index.is_there:
            with gate(self.path):
                return self._renew_index()
        return self._index

    def _renew_index(self) -> DiskIndex:
        """Begin the index anew, if no other process has done so; the files say themselves what they hold.

        To be called at the gate.
        """
        if self._index is not None:
            self._index.close()
            self._index = None
        newest = newest_generation(self.path)
        if newest is None or newest <= self._generation:
            newest = self._generation + 1
        self._index, self._generation = DiskIndex(self.path, newest), newest
        self._compare(self._index)
        remove_generations(self.path, before=newest)
        return self._index

    def _compare(self, index: DiskIndex) -> None:
        """List files whose writer was stopped before it could; drop entries of files that are not there, or not so."""
        # In this order: what another process writes meanwhile is at worst listed twice, never taken for lost.
        listed = index.files()
        on_disk = {path.relative_to(self.path).as_posix(): path for path in self.path.glob(f"??/*{SUFFIX}")}
        measured = {file: regular_bytes(path) for file, path in on_disk.items() if FILE.fullmatch(file)}
        sizes = {file: num_bytes for file, num_bytes in measured.items() if num_bytes is not None}
        wrong = {file for file, num_bytes in listed.items() if sizes.get(file) != num_bytes}
        for file in wrong:
            index.remove(file)
        if wrong & index.files().keys():
            raise sqlite3.DatabaseError("entries of the index cannot be removed")
        for file in sizes.keys() - (listed.keys() - wrong):
            try:
                self._list(index, describe_bundle(self.path, file), file, sizes[file])
            except (DamagedBundle, OSError):
                (self.path / file).unlink(missing_ok=True)
                self.counts["damaged"] += 1

    def _list(self, index: DiskIndex, bundle: Bundle, file: str, num_bytes: int) -> None:
        """List a file, or remove it if others hold all that is in it: two processes wrote the same blocks."""
        if not index.add(bundle.kind, bundle.namespace, bundle.names, file, num_bytes):
            (self.path / file).unlink(missing_ok=True)

    def _lose_index(self, error: Exception) -> None:
        """The database failed while in use: a damaged one is made anew, any other trouble stops writing."""
        try:
            if isinstance(error, (OSError, sqlite3.OperationalError)):
                self.stop_writing(f"the cache index in {self.path} cannot be used: {error}")
            else:
                with gate(self.path):
                    self._renew_index()
        except (OSError, *IndexTrouble) as second:
            self._index = None
            self.stop_writing(f"the cache index in {self.path} is damaged and cannot be made anew: {second}")

    def _drop(self, index: DiskIndex, file: str) -> None:
        index.remove(file)
        try:
            (self.path / file).unlink(missing_ok=True)
        except OSError as error:
            self.stop_writing(f"a file of the cache cannot be removed: {error}")
        self.num_bytes = index.total_bytes()

    def _evict(self, index: DiskIndex, num_bytes: int) -> None:
        """Make room for so many bytes within the quota."""
        removed = None
        self.num_bytes = index.total_bytes()
        while self.num_bytes + num_bytes > self.quota_bytes:
            file = index.oldest()
            if file is None:
                return
            # Bytes do not tell: other processes add files meanwhile.
            if file == removed:
                raise sqlite3.DatabaseError("entries of the index cannot be removed")
            self.counts["evicted"] += 1
            index.remove(file)
            (self.path / file).unlink(missing_ok=True)
            removed, self.num_bytes = file, index.total_bytes()
