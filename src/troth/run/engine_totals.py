"""What an engine has done since it started and what it is doing now, in numbers, as ``/v1/status`` shows them.

Refuses to know how steps are made (``engine.py``, which tells it what happened).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from troth.contracts.ports import EngineStatus
from troth.contracts.prefix_cache import PrefixCacheStatus
from troth.run.disk_port import DiskPort
from troth.run.drafting import Drafting
from troth.run.live_request import LiveRequest
from troth.run.memory_guard import MemoryGuard
from troth.schedule.scheduler import Scheduler


class EngineTotals:
    """Counts of one engine. One thread calls it."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0
        self._ends: Counter[str] = Counter()
        """Finish reason or error class -> requests."""

    def note_step(self) -> None:
        """A step was planned."""
        self._num_steps += 1

    def note_admission(self, live: LiveRequest) -> None:
        """A request has a row for the first time."""
        self._num_prompt_tokens += len(live.request.prompt_ids)
        self._num_cached_tokens += live.num_cached

    def note_end(self, end: str, num_emitted: int = 0) -> None:
        """A request ended, or was refused; ``end`` is a finish reason or the name of an error class."""
        self._ends[end] += 1
        self._num_completion_tokens += num_emitted

    def status(
        self,
        state: str,
        downgrades: tuple[str, ...],
        scheduler: Scheduler,
        *,
        drafting: Drafting | None,
        disk: DiskPort | None,
        memory: MemoryGuard | None,
    ) -> EngineStatus:
        """A snapshot of counters and queues.

        Args:
            state: as EngineStatus has it.
            downgrades: every fallback in force.
            scheduler, drafting, disk, memory: of the engine.
        """
        return EngineStatus(
            state=state,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_steps=self._num_steps,
            blocks_used=tuple(pool.num_used for pool in scheduler.pools),
            blocks_free=tuple(pool.num_free for pool in scheduler.pools),
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self._num_completion_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_requests_by_end=dict(self._ends),
            downgrades=downgrades,
            speculation=None if drafting is None else drafting.totals(),
            prefix_cache=_prefix_cache_status(scheduler, disk),
            memory=None if memory is None else memory.status(),
        )


def _prefix_cache_status(scheduler: Scheduler, disk: DiskPort | None) -> PrefixCacheStatus | None:
    index, pins = scheduler.prefix_index, scheduler.pins
    if index is None:
        return None
    return replace(
        index.status(),
        pins=pins.status(),
        pinned_bytes=pins.num_bytes,
        disk=None if disk is None else disk.status(),
    )
