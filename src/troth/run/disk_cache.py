"""The prompt cache's disk tier as the generation loop drives it: what leaves memory goes out, what is wanted comes in.

Refuses to know rows, events and clients. Every call is made by the engine's thread and waits for nothing but ``close``;
what takes time runs in two threads of its own and in the tier's. Next: ``disk_restore.py``, ``disk_export.py``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Final

from troth.cache.disk_names import block_names
from troth.cache.disk_reach import DiskReach
from troth.cache.disk_tier import DiskTier
from troth.cache.host_copies import HostCopies
from troth.contracts.names import RequestId
from troth.contracts.ports import Clock
from troth.contracts.prefix_cache import DiskCacheStatus
from troth.contracts.request import Request
from troth.run.disk_export import DiskExport
from troth.run.disk_restore import DiskRestore
from troth.schedule.scheduler import Scheduler

BUSY_BYTES: Final = 8 * 2**20
"""Copied each way between two steps while requests run: 8 ms on one core of a busy machine."""
IDLE_BYTES: Final = 256 * 2**20
CLOSE_S: Final = 4.0
"""Given to what is still to be copied, and again to what is still to be written, when the engine closes."""


class DiskCache:
    """Connects one engine's prompt cache with a disk tier, which it owns.

    Args:
        scheduler: the engine's.
        tier: where things are kept.
        copies: reads and writes the caches.
        clock: the engine's.

    Raises:
        ValueError: the scheduler has no prompt cache.
    """

    def __init__(self, scheduler: Scheduler, tier: DiskTier, copies: HostCopies, clock: Clock) -> None:
        index = scheduler.prefix_index
        if index is None:
            raise ValueError("a disk tier needs a prompt cache in memory")
        self._scheduler = scheduler
        self._tier = tier
        self._copies = copies
        self._executor = ThreadPoolExecutor(2, "troth-disk-cache")
        reach = DiskReach(scheduler.limits.groups, scheduler.limits.num_checkpoints is not None)
        self._export = DiskExport(index, tier, copies, reach, self._executor)
        self._restore = DiskRestore(scheduler, tier, copies, reach, self._executor, clock)
        self._executor.submit(tier.measure)

    @property
    def downgrades(self) -> tuple[str, ...]:
        """What is not as it was asked for, in words."""
        return (f"disk cache: {self._tier.trouble}",) if self._tier.trouble else ()

    def begin(self, request: Request) -> bool:
        """A request came: whether it should wait for what is on disk of its prompt."""
        return self._restore.begin(request)

    def is_waiting(self, request_id: RequestId) -> bool:
        """Whether a request should still wait."""
        return self._restore.is_waiting(request_id)

    def forget(self, request_id: RequestId) -> None:
        """A request ended."""
        self._restore.forget(request_id)

    def withdraw(self, request: Request) -> None:
        """A request's row failed by itself: nothing that it was computed from is to be believed any more."""

        def remove() -> None:
            self._tier.withdraw(block_names(self._tier.namespace, request.namespace, request.prompt_ids))

        self._executor.submit(remove)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """So long did a prompt take of which so many tokens were computed."""
        self._restore.note_prefill(num_tokens, seconds)

    def work(self) -> bool:
        """Do what is due between two steps; whether there is more to come."""
        budget = BUSY_BYTES if self._scheduler.num_running else IDLE_BYTES
        self._restore.work(budget)
        self._export.work(budget)
        return not (self._restore.is_idle and self._export.is_idle)

    def wait(self, others: Sequence[Future[Any]], timeout_s: float) -> None:
        """Wait until there is more to do, here or for ``others``."""
        under_way = [*others, *self._restore.futures(), *self._export.futures()]
        if under_way:
            wait(under_way, timeout_s, FIRST_COMPLETED)
        else:
            self._tier.flush(timeout_s)

    def status(self) -> DiskCacheStatus:
        """A snapshot."""
        tier = self._tier.status()
        per_token = self._restore.seconds_per_token
        return DiskCacheStatus(
            folder=str(self._tier.folder),
            num_bytes=tier.num_bytes,
            quota_bytes=tier.quota_bytes,
            free_bytes=tier.free_bytes,
            num_written=tier.num_written,
            num_dropped=tier.num_dropped,
            num_damaged=tier.num_damaged,
            num_evicted=tier.num_evicted,
            read_bytes_per_s=tier.bytes_per_s,
            prefill_tokens_per_s=1 / per_token if per_token else 0.0,
            num_restored_tokens=self._restore.num_tokens,
            num_restores=dict(self._restore.outcomes),
            trouble=tier.trouble,
        )

    def close(self, *, keep: bool = True) -> None:
        """End: nobody waits any more, what rows left behind is written. ``keep`` False: it is not to be believed."""
        self._restore.close()
        deadline = time.monotonic() + CLOSE_S
        while keep and not self._export.is_idle and time.monotonic() < deadline:
            self._export.work(IDLE_BYTES)
            self.wait((), 0.05)
        self._executor.shutdown()
        self._tier.close(CLOSE_S)
        self._copies.close()
