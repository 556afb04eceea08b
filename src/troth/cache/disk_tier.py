"""The disk tier of the prompt cache: blocks and states that outlive the process, shared by every process on one folder.

Refuses to know rows and the tree in memory. Offers are written behind by one thread; whatever goes wrong with the disk
ends in a miss and in a sentence for the status, never in an error of a request.

    folder/index.sqlite          which file holds which block (``disk_index.py``)
    folder/ab/ab12...safetensors  the files, named after their content (``disk_segment.py``)
    folder/scratch-*/            what a process is writing; removed by whoever finds its owner gone
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import sqlite3
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from torch import Tensor

from troth.cache.disk_index import FILE_NAME, DiskIndex
from troth.cache.disk_segment import (
    SUFFIX,
    DamagedSegment,
    Segment,
    SegmentKind,
    describe_segment,
    read_segment,
    write_segment,
)

_log = logging.getLogger(__name__)

QUOTA_BYTES: Final = 10 * 2**30
QUOTA_SHARE: Final = 0.1
"""Of the free disk; the smaller of the two is the default quota."""
QUEUE_BYTES: Final = 256 * 2**20
"""Most bytes that wait to be written; what does not fit is not kept."""
_LOCK: Final = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierStatus:
    """A snapshot."""

    num_bytes: int
    quota_bytes: int
    num_written: int
    """Files written by this process."""
    num_dropped: int
    """Offers that did not fit into the queue."""
    num_damaged: int
    """Files found damaged or missing, and removed."""
    num_evicted: int
    trouble: str = ""
    """Why nothing is written any more; empty while all is well."""


class DiskTier:
    """One process's way to the folder. Thread-safe.

    Args:
        folder: made if it is not there.
        namespace: ``disk_names.cache_namespace``; part of what a file must say of itself.
        quota_bytes: most bytes of all files; None: the default.

    A folder that cannot be used gives a tier that holds nothing and says so in its status.
    """

    def __init__(self, folder: Path, namespace: str, *, quota_bytes: int | None = None) -> None:
        self._folder = folder
        self._namespace = namespace
        self._quota = 0
        self._trouble = ""
        self._lock = threading.Lock()
        """Guards the connection and the counters."""
        self._index: DiskIndex | None = None
        self._scratch: Path | None = None
        self._scratch_lock: IO[str] | None = None
        self._queue: deque[Segment] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        """Guards the queue."""
        self._closing = False
        self._counts = dict.fromkeys(("written", "dropped", "damaged", "evicted"), 0)
        try:
            self._open(quota_bytes)
        except (OSError, sqlite3.OperationalError) as error:
            self._stop_writing(f"the cache folder {folder} cannot be used: {error}")
        except sqlite3.Error as error:
            self._lose_index(error)
        self._thread = threading.Thread(target=self._write_behind, name="troth-disk-cache", daemon=True)
        self._thread.start()

    def offer(self, kind: SegmentKind, names: Sequence[bytes], tensors: dict[str, Tensor]) -> bool:
        """Keep blocks, if there is time and room; whether they were taken. Never waits.

        Args:
            names: of consecutive blocks, or of the one a state follows.
            tensors: on the CPU, first dimension len(names); the tier's own from now on.
        """
        segment = Segment(kind=kind, namespace=self._namespace, names=tuple(names), tensors=tensors)
        with self._changed:
            fits = self._queued_bytes + segment.num_bytes <= QUEUE_BYTES
            if self._closing or self._trouble or not fits:
                self._counts["dropped"] += not fits
                return False
            self._queue.append(segment)
            self._queued_bytes += segment.num_bytes
            self._changed.notify_all()
        return True

    def count(self, kind: SegmentKind, names: Sequence[bytes]) -> int:
        """How many of ``names``, from the first, are listed. Their files may yet prove damaged."""
        with self._lock:
            if self._index is None:
                return 0
            try:
                return len(self._index.find(kind, names))
            except sqlite3.Error as error:
                self._lose_index(error)
                return 0

    def read(self, kind: SegmentKind, names: Sequence[bytes]) -> list[dict[str, Tensor]]:
        """The tensors of the longest beginning of ``names`` that is held and whole, one entry per block.

        A file that is not what it should be is removed, and the beginning ends before it.
        """
        blocks: list[dict[str, Tensor]] = []
        used: dict[str, Segment] = {}
        with self._lock:
            if self._index is None:
                return blocks
            try:
                for name, place in zip(names, self._index.find(kind, names), strict=False):
                    segment = used.get(place.file) or read_segment(self._folder, place.file)
                    self._require(segment, kind, name, place.position)
                    used[place.file] = segment
                    blocks.append({key: tensor[place.position] for key, tensor in segment.tensors.items()})
                self._index.touch(used)
            except DamagedSegment as error:
                self._remove_damaged(str(error), place.file)
            except sqlite3.Error as error:
                self._lose_index(error)
        return blocks

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was offered is written; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued_bytes or bool(self._trouble), timeout_s)

    def status(self) -> DiskTierStatus:
        """A snapshot."""
        with self._lock:
            try:
                num_bytes = 0 if self._index is None else self._index.total_bytes()
            except sqlite3.Error as error:
                self._lose_index(error)
                num_bytes = 0
            return DiskTierStatus(
                num_bytes=num_bytes,
                quota_bytes=self._quota,
                trouble=self._trouble,
                **{f"num_{name}": count for name, count in self._counts.items()},
            )

    def close(self) -> None:
        """Write what is queued, then let the folder go. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._scratch = None
            if self._scratch_lock is not None:
                self._scratch_lock.close()
                self._scratch_lock = None

    def _open(self, quota_bytes: int | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        # Locked before it gets the name by which others look for abandoned ones.
        new = Path(tempfile.mkdtemp(prefix="new-", dir=self._folder))
        self._scratch_lock = (new / _LOCK).open("w")
        fcntl.flock(self._scratch_lock, fcntl.LOCK_EX)
        self._scratch = new.rename(new.with_name(new.name.replace("new-", "scratch-", 1)))
        try:
            self._index = DiskIndex(self._folder)
            self._adopt_unlisted(self._index)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            self._renew_index()
        assert self._index is not None
        free = shutil.disk_usage(self._folder).free + self._index.total_bytes()
        self._quota = min(QUOTA_BYTES, int(free * QUOTA_SHARE)) if quota_bytes is None else quota_bytes
        self._evict(self._index, 0)

    def _remove_abandoned(self) -> None:
        """Remove the scratch folders of processes that are gone: nobody holds their lock."""
        for scratch in self._folder.glob("scratch-*"):
            try:
                with open(scratch / _LOCK) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(scratch, ignore_errors=True)
            except OSError:
                continue  # its owner is alive, or another process is just removing it

    def _adopt_unlisted(self, index: DiskIndex) -> None:
        """List files whose writer was stopped before it could; drop entries of files that are not there."""
        on_disk = {str(path.relative_to(self._folder)) for path in self._folder.glob(f"??/*{SUFFIX}")}
        listed = index.files()
        for file in listed - on_disk:
            index.remove(file)
        for file in on_disk - listed:
            try:
                found = describe_segment(self._folder, file)
                index.add(found.kind, found.namespace, found.names, file, (self._folder / file).stat().st_size)
            except (DamagedSegment, OSError):
                (self._folder / file).unlink(missing_ok=True)
                self._counts["damaged"] += 1

    def _renew_index(self) -> None:
        """Begin the index anew; the files say themselves what they hold."""
        if self._index is not None:
            self._index.close()
            self._index = None
        for suffix in ("", "-wal", "-shm"):
            (self._folder / f"{FILE_NAME}{suffix}").unlink(missing_ok=True)
        self._index = DiskIndex(self._folder)
        self._adopt_unlisted(self._index)

    def _lose_index(self, error: sqlite3.Error) -> None:
        """The database failed while in use: a damaged one is made anew, any other trouble stops writing."""
        try:
            if isinstance(error, sqlite3.OperationalError):
                self._stop_writing(f"the cache index in {self._folder} cannot be used: {error}")
            else:
                self._renew_index()
        except (OSError, sqlite3.Error) as second:
            self._index = None
            self._stop_writing(f"the cache index in {self._folder} is damaged and cannot be made anew: {second}")

    def _stop_writing(self, why: str) -> None:
        if not self._trouble:
            _log.warning("the disk cache writes nothing more: %s", why)
        self._trouble = why

    def _require(self, segment: Segment, kind: SegmentKind, name: bytes, position: int) -> None:
        """Raise DamagedSegment unless the segment itself says that it holds the block there."""
        held = segment.names[position] if 0 <= position < len(segment.names) else b""
        if (segment.kind, segment.namespace, held) != (kind, self._namespace, name):
            raise DamagedSegment("the index names the wrong file for a block")

    def _remove_damaged(self, why: str, file: str) -> None:
        _log.warning("removing a damaged file of the disk cache: %s", why)
        self._counts["damaged"] += 1
        self._drop(file)

    def _drop(self, file: str) -> None:
        assert self._index is not None
        try:
            self._index.remove(file)
            (self._folder / file).unlink(missing_ok=True)
        except (OSError, sqlite3.Error) as error:
            self._stop_writing(f"a file of the cache cannot be removed: {error}")

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                segment = self._queue.popleft()
            try:
                if not self._trouble:
                    self._write(segment)
            except OSError as error:
                self._stop_writing(f"the cache in {self._folder} cannot be written: {error}")
            except sqlite3.Error as error:
                with self._lock:
                    self._lose_index(error)
            # The edge of the thread: a bug here costs what was offered, not the engine.
            except Exception as error:
                _log.exception("writing to the disk cache failed")
                self._stop_writing(f"writing failed: {error!r}")
            with self._changed:
                self._queued_bytes -= segment.num_bytes
                self._changed.notify_all()

    def _write(self, segment: Segment) -> None:
        with self._lock:
            if self._index is None or self._scratch is None or segment.num_bytes > self._quota:
                return
            if len(self._index.find(segment.kind, segment.names)) == len(segment.names):
                return
            self._evict(self._index, segment.num_bytes)
            scratch = self._scratch
        # Without the lock: the slow part, which no lookup should wait for.
        file, num_bytes = write_segment(segment, self._folder, scratch)
        with self._lock:
            if self._index is not None:
                self._index.add(segment.kind, segment.namespace, segment.names, file, num_bytes)
                self._counts["written"] += 1
                self._evict(self._index, 0)

    def _evict(self, index: DiskIndex, num_bytes: int) -> None:
        """Make room for so many bytes within the quota."""
        held = index.total_bytes()
        while held + num_bytes > self._quota:
            file = index.oldest()
            if file is None:
                return
            self._counts["evicted"] += 1
            index.remove(file)
            (self._folder / file).unlink(missing_ok=True)
            left = index.total_bytes()
            if left >= held:
                raise sqlite3.DatabaseError("entries of the index cannot be removed")
            held = left
