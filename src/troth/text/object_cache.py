"""The object cache: exact work kept within a number of bytes, the least recently used given up first.

Refuses to know what is kept. Contract: ``contracts/object_cache.py``. Used by ``grammar.py`` and
``token_beginnings.py``.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, Self

from troth.contracts.object_cache import ObjectCacheStatus


class _Entry:
    __slots__ = ("num_bytes", "num_leases", "value")

    def __init__(self, value: Any, num_bytes: int) -> None:
        self.value = value
        self.num_bytes = num_bytes
        self.num_leases = 0


class Lease:
    """As contracts.object_cache.ObjectLease."""

    __slots__ = ("_entry", "_owner")

    def __init__(self, entry: _Entry, owner: BoundedObjects) -> None:
        self._entry: _Entry | None = entry
        self._owner = owner

    @property
    def value(self) -> Any:
        """What was put. Raises ValueError once the lease was released."""
        if self._entry is None:
            raise ValueError("the lease was released; take the object again")
        return self._entry.value

    def release(self) -> None:
        """Done with it."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._owner._released(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class BoundedObjects:
    """As contracts.object_cache.ObjectCache.

    Args:
        max_bytes: of all values together, leased ones that were given up aside.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._making: dict[Hashable, Future[tuple[Any, int]]] = {}
        self._num_bytes = 0
        self._num_hits = 0
        self._num_misses = 0
        self._num_evicted = 0

    def take(self, key: Hashable) -> Lease | None:
        """As ObjectCache.take."""
        with self._lock:
            return self._take(key)

    def put(self, key: Hashable, value: Any, num_bytes: int) -> Lease:
        """As ObjectCache.put."""
        with self._lock:
            return self._put(key, value, num_bytes)

    def take_or_make(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> Lease:
        """As ObjectCache.take_or_make."""
        with self._lock:
            lease = self._take(key)
            if lease is not None:
                return lease
            under_way = self._making.get(key)
            if under_way is None:
                made = self._making[key] = Future()
        if under_way is not None:
            value, num_bytes = under_way.result()
            # Not put again: the maker did, and it may have been given up already.
            with self._lock:
                return self._leased(_Entry(value, num_bytes))
        try:
            value, num_bytes = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            made.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            lease = self._put(key, value, num_bytes)
        made.set_result((value, num_bytes))
        return lease

    def status(self) -> ObjectCacheStatus:
        """As ObjectCache.status."""
        with self._lock:
            return ObjectCacheStatus(
                num_objects=len(self._entries),
                num_bytes=self._num_bytes,
                max_bytes=self._max_bytes,
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_evicted=self._num_evicted,
            )

    def _take(self, key: Hashable) -> Lease | None:
        entry = self._entries.get(key)
        if entry is None:
            self._num_misses += 1
            return None
        self._num_hits += 1
        self._entries.move_to_end(key)
        return self._leased(entry)

    def _put(self, key: Hashable, value: Any, num_bytes: int) -> Lease:
        entry = _Entry(value, num_bytes)
        older = self._entries.pop(key, None)
        if older is not None:
            self._num_bytes -= older.num_bytes
        if self._make_room(num_bytes):
            self._entries[key] = entry
            self._num_bytes += num_bytes
        return self._leased(entry)

    def _make_room(self, num_bytes: int) -> bool:
        """Give up what is not leased, longest ago first; whether there is room then. Nothing goes in vain."""
        lacking, given_up = self._num_bytes + num_bytes - self._max_bytes, []
        if lacking > 0:
            for key, entry in self._entries.items():
                if not entry.num_leases:
                    given_up.append(key)
                    lacking -= entry.num_bytes
                    if lacking <= 0:
                        break
        if lacking > 0:
            return False
        for key in given_up:
            self._num_bytes -= self._entries.pop(key).num_bytes
            self._num_evicted += 1
        return True

    def _leased(self, entry: _Entry) -> Lease:
        entry.num_leases += 1
        return Lease(entry, self)

    def _released(self, entry: _Entry) -> None:
        with self._lock:
            entry.num_leases -= 1
