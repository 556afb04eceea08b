"""Keeps the process within its memory: reads now and then what it really holds, and makes that less before it refuses.

Refuses to know how memory is read and given back (``cache/block_memory.py``). Pools are as large as the plan says, but
on a CPU their pages cost nothing before they are used, and again nothing once they were given back. On a GPU they are
there from the start and stay: to forget blocks would free nothing, so nothing is forgotten.

    below the soft mark    nothing
    above it               what free blocks hold, or an allocator keeps, is given back; then, where that makes the
                           process smaller, cached blocks are forgotten, least wanted first, and given back too
    above the hard mark    besides, new requests are refused (Busy) until it is less
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from troth.contracts.memory_plan import MemoryPlan, MemoryStatus
from troth.contracts.names import BlockId
from troth.errors import Busy, OptionError
from troth.schedule.scheduler import Scheduler

SOFT_SHARE: Final = 0.9
"""Of a hard mark that was asked for."""
RETRY_S: Final = 5.0
"""When a refused client may come back: running requests end, and give their blocks back."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Bytes of the process, or of its device memory."""

    soft: int
    hard: int


def memory_marks(plan: MemoryPlan, base_bytes: int, soft: int | None, hard: int | None) -> Marks:
    """The marks in force.

    Args:
        plan: what loading was decided on; a process that keeps to it comes near neither of the default marks.
        base_bytes: what the process held before it loaded anything.
        soft, hard: as asked for; None: by the plan.

    Raises:
        OptionError: the soft mark is above the hard one.
    """
    if hard is None:
        hard = max(base_bytes + plan.usable_bytes, soft or 0)
        default = hard - plan.reserve_bytes // 2
    else:
        default = int(hard * SOFT_SHARE)
    if soft is not None and soft > hard:
        raise OptionError(f"memory_soft_bytes {soft} is above memory_hard_bytes {hard}; lower it, or leave it out")
    return Marks(default if soft is None else soft, hard)


class MemoryGuard:
    """Owns the last reading. The engine's thread calls it between steps; giving back waits for one under way.

    Args:
        scheduler: the engine's; its prompt cache makes room.
        marks: see there.
        read: bytes held now; None where that cannot be known, and then nothing is done.
        give_back: gives the memory of these blocks of each group back; they hold nothing that is ever read again.
        frees_blocks: whether that makes the process smaller by what they held.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        marks: Marks,
        read: Callable[[], int | None],
        give_back: Callable[[Sequence[Sequence[BlockId]]], None],
        *,
        frees_blocks: bool = True,
    ) -> None:
        self._scheduler = scheduler
        self._marks = marks
        self._read = read
        self._give_back = give_back
        self._frees_blocks = frees_blocks
        self._held = 0
        self._num_shed = 0
        self._num_refused = 0

    @property
    def downgrades(self) -> tuple[str, ...]:
        """What is not as it was asked for, in words."""
        return (f"memory: {self._excess()}; new requests are refused",) if self._held > self._marks.hard else ()

    def follow(self) -> None:
        """Read what the process holds, and make it less where it is too much."""
        held = self._read()
        if held is not None and held > self._marks.soft:
            self._give_back_free()
            held = self._read() or 0
            if held > self._marks.soft and self._frees_blocks and self._shed(held - self._marks.soft):
                self._give_back_free()
                held = self._read() or 0
        self._held = held or 0

    def require_room(self) -> None:
        """Raise Busy while the process holds more than the hard mark."""
        if self._held > self._marks.hard:
            self._num_refused += 1
            raise Busy(f"{self._excess()}; try again when running requests have ended", retry_after_s=RETRY_S)

    def status(self) -> MemoryStatus:
        """A snapshot, as of the last reading."""
        return MemoryStatus(
            held_bytes=self._held,
            soft_bytes=self._marks.soft,
            hard_bytes=self._marks.hard,
            num_shed_blocks=self._num_shed,
            num_refused=self._num_refused,
        )

    def _excess(self) -> str:
        return f"this engine holds {self._held} bytes of memory, {self._marks.hard} are allowed"

    def _give_back_free(self) -> None:
        self._give_back([pool.free_ids for pool in self._scheduler.pools])

    def _shed(self, num_bytes: int) -> int:
        """Forget cached blocks that come to so many bytes, of each group its share; how many there were."""
        pools, groups = self._scheduler.pools, self._scheduler.limits.groups
        cached = [pool.num_cached for pool in pools]
        of_all = sum(count * spec.bytes_per_block for count, spec in zip(cached, groups, strict=True))
        if not of_all:
            return 0
        share = min(1.0, num_bytes / of_all)
        shed = sum(self._scheduler.shed([-int(-count * share // 1) for count in cached]))
        self._num_shed += shed
        return shed
