"""Blocks on their way from the disk tier into the prompt cache, while the request that wants them waits.

Refuses to know steps and rows. A request waits only as long as computing its prompt would take; where reading is slower
than that, it is not even begun. Next: ``schedule/reservations.py`` for the room, ``disk_export.py`` for the way out.

    begin -> [look up] -> reserve -> [read a piece] -> copy, a bounded share between two steps -> ... -> adopt
    in brackets: other threads. Look-ups are made at once, texts are read one after the other, in order of arrival.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from troth.cache.disk_names import STATE, BundleKind, block_names, kv_kind
from troth.cache.disk_reach import DiskReach, runs
from troth.cache.disk_tier import DiskTier, Span
from troth.cache.host_copies import HostCopies
from troth.contracts.names import BLOCK_TOKENS, BlockId, RequestId
from troth.contracts.ports import Clock
from troth.contracts.prefix_cache import RestoreOutcome
from troth.contracts.request import Request
from troth.schedule.reservations import Reservation
from troth.schedule.scheduler import Scheduler

PIECE_BYTES: Final = 32 * 2**20
"""Read at once; up to three of them lie in main memory."""
LONGEST_WAIT_S: Final = 10.0
"""Of a request, while it is not known how long computing its prompt takes."""
_WEIGHT: Final = 0.3
"""Of the newest measurement in the running mean."""
_NOTED_TOKENS: Final = 32
"""Shorter prompts tell how long a step takes, not how long a token does."""
_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class _Found:
    """How far the files reach."""

    names: list[bytes]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive blocks of one group, or one state."""

    kind: BundleKind
    places: range
    block_ids: list[BlockId]


@dataclass(slots=True)
class _Restore:
    """One request's text."""

    request: Request
    look_up: Future[_Found]
    give_up_at: float
    num_attempts: int = 1
    found: _Found | None = None
    reservation: Reservation | None = None
    pieces: deque[_Piece] = field(default_factory=deque)
    """Not asked for yet."""
    reading: deque[tuple[_Piece, Future[list[Span]]]] = field(default_factory=deque)
    read: deque[tuple[_Piece, Span]] = field(default_factory=deque)
    """Not copied yet."""
    gained_tokens: int = 0


class DiskRestore:
    """Owns what is on its way into one engine's caches. The engine's thread calls it.

    Args:
        executor: runs look-ups and reads.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tier: DiskTier,
        copies: HostCopies,
        reach: DiskReach,
        executor: Executor,
        clock: Clock,
    ) -> None:
        self._scheduler = scheduler
        self._tier = tier
        self._copies = copies
        self._reach = reach
        self._executor = executor
        self._clock = clock
        self._by_id: dict[RequestId, _Restore] = {}
        self.seconds_per_token = 0.0
        """Of computing a prompt, a running mean; 0: not known yet."""
        self.outcomes: Counter[RestoreOutcome] = Counter()
        self.num_tokens = 0
        """Tokens that came back from disk."""

    @property
    def is_idle(self) -> bool:
        """Whether no request waits."""
        return not self._by_id

    def futures(self) -> Iterator[Future[Any]]:
        """What is under way in other threads."""
        for one in self._by_id.values():
            if one.found is None:
                yield one.look_up
            elif one.reading:
                yield one.reading[0][1]

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """So long did a prompt take of which so many tokens were computed."""
        if num_tokens >= _NOTED_TOKENS and seconds > 0:
            measured = seconds / num_tokens
            self.seconds_per_token += (measured - self.seconds_per_token) * (_WEIGHT if self.seconds_per_token else 1)

    def begin(self, request: Request) -> bool:
        """Look for a request's prompt; whether it should wait."""
        whole = (len(request.prompt_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if not request.prompt_cache or request.sampling.prompt_logprobs is not None or not whole:
            return False
        num_known = self._num_known(request)
        if num_known >= whole:
            return False
        if self._is_slower(num_known, whole):
            self.outcomes["slower"] += 1
            return False
        wait_s = (whole - num_known) * self.seconds_per_token if self.seconds_per_token else LONGEST_WAIT_S
        self._by_id[request.request_id] = _Restore(
            request, self._executor.submit(self._find, request), self._clock() + wait_s
        )
        return True

    def is_waiting(self, request_id: RequestId) -> bool:
        """Whether a request should not be started yet."""
        return request_id in self._by_id

    def forget(self, request_id: RequestId) -> None:
        """A request ended."""
        one = self._by_id.get(request_id)
        if one is not None:
            self._end(one, "late")

    def work(self, budget_bytes: int) -> None:
        """Copy at most so many bytes, one file's over that at most, and move everything on that is due."""
        for one in list(self._by_id.values()):
            if one.found is None and one.look_up.done():
                one.found = one.look_up.result()
                if not one.found.num_blocks:
                    self._end(one, "nothing")
        # One text after the other: those that share a beginning with it find that in memory.
        first = next((one for one in self._by_id.values() if one.found is not None), None)
        if first is not None:
            self._advance(first, budget_bytes)
        now = self._clock()
        if self._scheduler.num_free_rows:
            for one in [one for one in self._by_id.values() if now >= one.give_up_at]:
                self._end(one, "late")

    def close(self) -> None:
        """Give back what is reserved."""
        for one in list(self._by_id.values()):
            self._end(one, "late")

    def _find(self, request: Request) -> _Found:
        """In another thread."""
        names = block_names(self._tier.namespace, request.namespace, request.prompt_ids[:-1])
        held = {kind: self._tier.held(kind, names) for kind in self._reach.kinds}
        return _Found(names, self._reach.deepest(held, len(names)))

    def _num_known(self, request: Request) -> int:
        index = self._scheduler.prefix_index
        return 0 if index is None else index.match(request.namespace, request.prompt_ids).num_tokens

    def _is_slower(self, num_known: int, num_tokens: int) -> bool:
        """Whether reading what a hit after ``num_tokens`` needs takes longer than computing it; False if not known."""
        num_known_blocks = num_known // BLOCK_TOKENS
        num_bytes = sum(
            len(needed[max(0, num_known_blocks - needed.start) :]) * self._bytes_of(kind)
            for kind in self._reach.kinds
            for needed in [self._reach.needed(kind, num_tokens // BLOCK_TOKENS)]
        )
        computing_s = self.seconds_per_token * (num_tokens - num_known)
        return 0 < computing_s <= self._tier.speed.seconds(num_bytes, len(self._reach.kinds))

    def _advance(self, one: _Restore, budget_bytes: int) -> None:
        if one.reservation is None:
            refusal = self._start(one)
            if refusal is not None:
                self._end(one, refusal)
                return
        while budget_bytes > 0:
            if one.read:
                piece, span = one.read.popleft()
                self._fill(one, piece, span)
                budget_bytes -= span.count * self._bytes_of(piece.kind)
            elif one.reading and one.reading[0][1].done():
                piece, reading = one.reading.popleft()
                spans = reading.result()
                if sum(span.count for span in spans) != len(piece.places):
                    self._try_again(one)
                    return
                one.read.extend((piece, span) for span in spans)
                self._ask_for_more(one)
            else:
                break
        if not one.read and not one.reading:
            assert one.reservation is not None
            self._scheduler.adopt(one.reservation.reservation_id)
            one.reservation = None
            self.num_tokens += one.gained_tokens
            self._end(one, "restored")

    def _start(self, one: _Restore) -> RestoreOutcome | None:
        """Take room and begin to read; why not, if it is not worth it."""
        assert one.found is not None
        num_known, num_tokens = self._num_known(one.request), one.found.num_blocks * BLOCK_TOKENS
        if num_tokens <= num_known:
            return "known"
        if self._is_slower(num_known, num_tokens):
            return "slower"
        one.gained_tokens = num_tokens - num_known
        one.reservation = self._scheduler.reserve(one.request.namespace, one.request.prompt_ids[:num_tokens])
        if one.reservation is None:
            return "no_room"
        for fill in one.reservation.fills:
            kind = kv_kind(fill.group)
            wanted = list(range(fill.first_index, fill.first_index + len(fill.block_ids)))
            for run in runs(wanted, max(1, PIECE_BYTES // self._bytes_of(kind))):
                at = run.start - fill.first_index
                one.pieces.append(_Piece(kind, run, fill.block_ids[at : at + len(run)]))
        if one.reservation.checkpoint_id is not None:
            one.pieces.append(_Piece(STATE, range(one.found.num_blocks - 1, one.found.num_blocks), []))
        self._ask_for_more(one)
        return None

    def _ask_for_more(self, one: _Restore) -> None:
        assert one.found is not None
        while one.pieces and len(one.reading) < 2:
            piece = one.pieces.popleft()
            names = one.found.names[piece.places.start : piece.places.stop]
            one.reading.append((piece, self._executor.submit(self._read, piece.kind, names)))

    def _read(self, kind: BundleKind, names: list[bytes]) -> list[Span]:
        """In another thread: as much as is whole and the caches can take."""
        if kind == STATE:
            return self._tier.read(kind, names, self._copies.takes_state)
        return self._tier.read(kind, names, partial(self._copies.takes_blocks, self._reach.group_of(kind)))

    def _fill(self, one: _Restore, piece: _Piece, span: Span) -> None:
        assert one.reservation is not None
        if piece.kind == STATE:
            assert one.reservation.checkpoint_id is not None
            self._copies.write_state(one.reservation.checkpoint_id, span.tensors)
        else:
            block_ids = piece.block_ids[span.first : span.first + span.count]
            self._copies.write_blocks(self._reach.group_of(piece.kind), block_ids, span.tensors)

    def _try_again(self, one: _Restore) -> None:
        """Files were not what they should be, and are gone now: perhaps fewer blocks can still be had."""
        self._give_back(one)
        if one.num_attempts >= _ATTEMPTS:
            self._end(one, "damaged")
            return
        one.num_attempts += 1
        one.found = None
        one.look_up = self._executor.submit(self._find, one.request)

    def _give_back(self, one: _Restore) -> None:
        one.pieces.clear()
        one.reading.clear()
        one.read.clear()
        if one.reservation is not None:
            self._scheduler.abandon(one.reservation.reservation_id)
            one.reservation = None

    def _end(self, one: _Restore, outcome: RestoreOutcome) -> None:
        self._give_back(one)
        self.outcomes[outcome] += 1
        del self._by_id[one.request.request_id]

    def _bytes_of(self, kind: BundleKind) -> int:
        return self._copies.state_bytes if kind == STATE else self._copies.block_bytes(self._reach.group_of(kind))
