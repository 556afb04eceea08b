"""The disk tier of the prompt cache: blocks and states that outlive the process, shared by every process on one folder.

Refuses to know rows and the tree in memory. Offers are written behind by one thread; whatever goes wrong with the disk
ends in a miss and in a sentence for the status, never in an error of a request. Next: ``disk_folder.py`` for what lies
on the disk, ``run/disk_cache.py`` for who offers and asks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from troth.cache.disk_bundle import Bundle
from troth.cache.disk_folder import DiskFolder
from troth.cache.disk_index import IndexTrouble
from troth.cache.disk_names import BundleKind
from troth.cache.disk_speed import DiskSpeed

_log = logging.getLogger(__name__)

_EXPONENTS: Final = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
}
Fits = Callable[[Mapping[str, Tensor]], bool]
"""Whether tensors, by name, can be those of a model."""
NOTED_BYTES: Final = 2**20
"""Reading less tells how long files take to open, not how fast they are read."""
QUEUE_BYTES: Final = 256 * 2**20
"""Most bytes that wait to be written; what does not fit is not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierStatus:
    """A snapshot."""

    num_bytes: int
    quota_bytes: int
    free_bytes: int
    num_written: int
    """Files written by this process."""
    num_dropped: int
    """Offers that did not fit into the queue, or were not finite."""
    num_damaged: int
    """Files found damaged or missing, and removed."""
    num_evicted: int
    bytes_per_s: float
    """How fast files are read and proved; 0: not measured yet."""
    trouble: str = ""
    """Why nothing is written any more; empty while all is well."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks that came from one file."""

    first: int
    """Place of the first among the names that were asked for."""
    count: int
    tensors: dict[str, Tensor]
    """First dimension: the blocks."""


@dataclass(frozen=True, slots=True)
class _Withdrawal:
    """Blocks to forget, in turn with what is written."""

    names: tuple[bytes, ...]
    num_bytes: int = 0


class DiskTier:
    """One process's way to the folder. Thread-safe.

    Args:
        folder: made if it is not there.
        namespace: ``disk_names.cache_namespace``; part of what a file must say of itself.
        quota_bytes: most bytes of all files; None: the default.
        label: what people call the namespace.

    A folder that cannot be used gives a tier that holds nothing and says so in its status.
    """

    def __init__(self, folder: Path, namespace: str, *, quota_bytes: int | None = None, label: str = "") -> None:
        self.folder = folder
        self.namespace = namespace
        self.speed = DiskSpeed()
        self._folder = DiskFolder(folder, quota_bytes=quota_bytes)
        self._folder.label(namespace, label)
        self._queue: deque[Bundle | _Withdrawal] = deque()
        self._num_unfinished = 0
        self._queued_bytes = 0
        self._num_dropped = 0
        self._changed = threading.Condition()
        """Guards the queue."""
        self._closing = False
        self._thread = threading.Thread(target=self._write_behind, name="troth-disk-cache", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why nothing is written any more; empty while all is well."""
        return self._folder.trouble

    @property
    def room_bytes(self) -> int:
        """Bytes that may be offered now."""
        return 0 if self._closing or self.trouble else max(0, QUEUE_BYTES - self._queued_bytes)

    def offer(self, kind: BundleKind, names: Sequence[bytes], tensors: dict[str, Tensor]) -> bool:
        """Keep blocks, if there is time and room; whether they were taken. Never waits.

        Args:
            names: of consecutive blocks, or of the one a state follows.
            tensors: on the CPU, first dimension len(names); the tier's own from now on.
        """
        bundle = Bundle(kind=kind, namespace=self.namespace, names=tuple(names), tensors=tensors)
        with self._changed:
            fits = self._queued_bytes + bundle.num_bytes <= QUEUE_BYTES
            if self._closing or self.trouble or not fits:
                self._num_dropped += not fits
                return False
            self._append(bundle)
        return True

    def held(self, kind: BundleKind, names: Sequence[bytes], *, used: bool = False) -> frozenset[int]:
        """Which of ``names``, by their place, are listed. Their files may yet prove damaged.

        Args:
            used: whether this counts as a use of them.
        """
        places = self._folder.find(kind, names)
        if used and places:
            self._folder.touch(dict.fromkeys(places[name].file for name in names if name in places))
        return frozenset(i for i, name in enumerate(names) if name in places)

    def read(self, kind: BundleKind, names: Sequence[bytes], fits: Fits | None = None) -> list[Span]:
        """The longest beginning of ``names`` that is held and whole, as consecutive spans.

        A file that is not what it should be is removed, and the beginning ends before it.

        Args:
            fits: whether tensors can be of this kind; None: any can.
        """
        started, num_bytes = time.perf_counter(), 0
        places = self._folder.find(kind, names)
        read: dict[str, Bundle] = {}
        spans: list[Span] = []
        at = 0
        while at < len(names) and names[at] in places:
            place = places[names[at]]
            bundle = read.get(place.file)
            if bundle is None:
                bundle = self._folder.read(place.file)
                if bundle is None:
                    break
                read[place.file] = bundle
                num_bytes += bundle.num_bytes
            is_ours = (bundle.kind, bundle.namespace) == (kind, self.namespace)
            count = _num_agreeing(bundle.names[place.position :], names[at:]) if is_ours else 0
            if not count:
                self._folder.remove_damaged(place.file, "the index names the wrong file for a block")
                break
            if fits is not None and not fits(bundle.tensors):
                self._folder.remove_damaged(place.file, f"{place.file}: its tensors are not those of this model")
                break
            end = place.position + count
            spans.append(Span(at, count, {key: t[place.position : end] for key, t in bundle.tensors.items()}))
            at += count
        self._folder.touch(read)
        if num_bytes >= NOTED_BYTES:
            self.speed.note(num_bytes, time.perf_counter() - started)
        return spans

    def withdraw(self, names: Sequence[bytes]) -> None:
        """Forget blocks that should not be believed, of every kind."""
        with self._changed:
            if not self._closing:
                self._append(_Withdrawal(tuple(names)))

    def measure(self) -> None:
        """Find out how fast the folder is; what goes wrong stops the writing. Takes some 50 ms."""
        try:
            if self._folder.scratch is not None:
                self.speed.probe(self._folder.scratch)
        except OSError as error:
            self._folder.stop_writing(f"the cache in {self._folder.path} cannot be written: {error}")

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was offered is written; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_unfinished, timeout_s)

    def status(self) -> DiskTierStatus:
        """A snapshot; waits for nothing."""
        counts = self._folder.counts
        return DiskTierStatus(
            num_bytes=self._folder.num_bytes,
            quota_bytes=self._folder.quota_bytes,
            free_bytes=self._folder.free_bytes,
            num_written=counts["written"],
            num_dropped=self._num_dropped,
            num_damaged=counts["damaged"],
            num_evicted=counts["evicted"],
            bytes_per_s=self.speed.bytes_per_s,
            trouble=self.trouble,
        )

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is queued, as far as the time allows, then let the folder go. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_unfinished, timeout_s)
            self._queue.clear()
        self._thread.join()
        self._folder.close()

    def _append(self, work: Bundle | _Withdrawal) -> None:
        self._queue.append(work)
        self._num_unfinished += 1
        self._queued_bytes += work.num_bytes
        self._changed.notify_all()

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                work = self._queue.popleft()
            if isinstance(work, Bundle):
                self._write(work)
            else:
                self._folder.remove_blocks(work.names)
            with self._changed:
                self._num_unfinished -= 1
                self._queued_bytes -= work.num_bytes
                self._changed.notify_all()

    def _write(self, bundle: Bundle) -> None:
        if self.trouble:
            return
        try:
            # What a row that fails leaves behind would make others fail, and outlive the process.
            if all(map(_is_finite, bundle.tensors.values())):
                self._folder.write(bundle)
            else:
                self._num_dropped += 1
        except OSError as error:
            self._folder.stop_writing(f"the cache in {self._folder.path} cannot be written: {error}")
        except IndexTrouble as error:
            self._folder.failed(error)
        # The edge of the thread: a bug here costs what was offered, not the engine.
        except Exception as error:
            _log.exception("writing to the disk cache failed")
            self._folder.stop_writing(f"writing failed: {error!r}")


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype not in _EXPONENTS:
        return True
    # A tenth of the time that isfinite takes, 8 ms for 16 MiB: all bits of the exponent are set in infinities and NaN.
    integers, exponent = _EXPONENTS[tensor.dtype]
    return int(tensor.view(integers).bitwise_and(exponent).max()) != exponent


def _num_agreeing(held: Sequence[bytes], wanted: Sequence[bytes]) -> int:
    count = 0
    for one, other in zip(held, wanted, strict=False):
        if one != other:
            break
        count += 1
    return count
