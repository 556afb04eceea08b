"""Blocks on their way from the prompt cache to the disk tier, after a row has left them.

Refuses to know requests and where blocks come from. Next: ``disk_restore.py`` for the way back, ``cache/disk_tier.py``.

    departure -> [other thread: what of it is not on disk] -> copied, a bounded share between two steps -> written

Nothing is marked as kept: the folder is asked each time, so that what was given up there, by whichever process, is
written again. Blocks are copied while the index lists them, so no lease is needed: whoever is given one writes to it in
a later step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

from troth.cache.disk_names import STATE, BundleKind, block_names
from troth.cache.disk_reach import DiskReach, runs
from troth.cache.disk_tier import DiskTier
from troth.cache.host_copies import HostCopies
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK
from troth.schedule.prefix_index import PrefixIndex
from troth.schedule.prefix_match import Departure
from troth.schedule.prefix_node import PrefixNode

BUNDLE_BYTES: Final = 8 * 2**20
"""Most of one file, and so of what is copied at once; a damaged or half-wanted one costs no more than that."""
MAX_DEPARTURES: Final = 256
"""Texts that wait to be looked at; older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class _Missing:
    """What of a text is not on disk."""

    departure: Departure
    names: list[bytes]
    runs: list[tuple[BundleKind, range]]
    """Stretches of blocks, in the order in which they are worth having."""


class DiskExport:
    """Owns what waits to be copied out of one engine's caches. The engine's thread calls it.

    Args:
        index: the prompt cache; its ``departures`` are taken from now on.
        executor: runs look-ups.
    """

    def __init__(
        self, index: PrefixIndex, tier: DiskTier, copies: HostCopies, reach: DiskReach, executor: Executor
    ) -> None:
        self._index = index
        self._tier = tier
        self._copies = copies
        self._reach = reach
        self._executor = executor
        self._departures: deque[Departure] = deque(maxlen=MAX_DEPARTURES)
        index.departures = self._departures
        self._look_up: Future[_Missing] | None = None
        self._missing: deque[tuple[_Missing, BundleKind, range]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return not (self._departures or self._look_up or self._missing)

    def futures(self) -> Iterator[Future[_Missing]]:
        """What is under way in another thread."""
        if self._look_up is not None:
            yield self._look_up

    def work(self, budget_bytes: int) -> None:
        """Copy at most so many bytes, and start the next look-up. One stretch may be copied over the budget."""
        if self._tier.trouble:
            self._departures.clear()
            self._missing.clear()
        if self._look_up is not None and self._look_up.done():
            found, self._look_up = self._look_up.result(), None
            self._missing.extend((found, kind, run) for kind, run in found.runs)
        while self._missing and budget_bytes > 0:
            missing, kind, run = self._missing[0]
            num_bytes = len(run) * self._bytes_of(kind)
            if num_bytes > self._tier.room_bytes:
                break
            self._missing.popleft()
            budget_bytes -= num_bytes
            self._copy(missing, kind, run)
        if self._look_up is None and not self._missing and self._departures:
            self._look_up = self._executor.submit(self._find_missing, self._departures.popleft())

    def _find_missing(self, departure: Departure) -> _Missing:
        """In another thread."""
        names = block_names(self._tier.namespace, departure.namespace, departure.token_ids)
        stretches: list[tuple[BundleKind, range]] = []
        for kind in self._reach.kinds:
            wanted = self._reach.wanted(kind, departure.ends)
            held = self._tier.held(kind, [names[place] for place in wanted], used=True)
            lacking = [place for i, place in enumerate(wanted) if i not in held]
            most = 1 if kind == STATE else max(1, BUNDLE_BYTES // self._bytes_of(kind))
            stretches += [(kind, run) for run in runs(lacking, most)]
        return _Missing(departure, names, stretches)

    def _copy(self, missing: _Missing, kind: BundleKind, run: range) -> None:
        chain = self._index.chain(missing.departure.namespace, missing.departure.token_ids[: run.stop * BLOCK_TOKENS])
        held = [place for place in run if place < len(chain) and self._holds(chain[place], kind)]
        for stretch in runs(held, len(run)):
            nodes, names = [chain[place] for place in stretch], [missing.names[place] for place in stretch]
            if kind == STATE:
                checkpoint_id = nodes[0].checkpoint_id
                assert checkpoint_id is not None
                self._tier.offer(kind, names, self._copies.read_state(checkpoint_id))
            else:
                group = self._reach.group_of(kind)
                self._tier.offer(kind, names, self._copies.read_blocks(group, [n.block_ids[group] for n in nodes]))

    def _holds(self, node: PrefixNode, kind: BundleKind) -> bool:
        if kind == STATE:
            return node.checkpoint_id is not None
        return node.block_ids[self._reach.group_of(kind)] != NO_BLOCK

    def _bytes_of(self, kind: BundleKind) -> int:
        return self._copies.state_bytes if kind == STATE else self._copies.block_bytes(self._reach.group_of(kind))
