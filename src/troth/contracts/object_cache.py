"""A bounded store of exact work that many requests ask for: compiled grammars, token ids of beginnings, media features.

Refuses to know what the values are; a key must say everything on which its value depends. ``text/object_cache.py`` is
the one implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCacheStatus:
    """A snapshot. Counts are totals since the start."""

    num_objects: int
    num_bytes: int
    max_bytes: int
    num_hits: int
    num_misses: int
    num_evicted: int


class ObjectLease(Protocol):
    """A value that is not given up before the lease is released. Leave it by ``with``, or ``release``; idempotent."""

    @property
    def value(self) -> Any:
        """What was put; shared with every other holder, so never changed."""

    def release(self) -> None:
        """Done with it."""

    def __enter__(self) -> Self:
        """The lease itself."""

    def __exit__(self, *exception: object) -> None:
        """Release it."""


class ObjectCache(Protocol):
    """Values by key, the least recently used given up first. Any thread."""

    def take(self, key: Hashable) -> ObjectLease | None:
        """The value of a key, leased; None when it is not held. Never waits for one that is being made."""

    def put(self, key: Hashable, value: Any, num_bytes: int) -> ObjectLease:
        """Hold a value from now on, as far as there is room, in place of an older one of its key; leased.

        What is larger than the whole cache, or finds no room beside what is leased, is leased and not kept.
        """

    def take_or_make(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> ObjectLease:
        """The value of a key, made by one of those who ask for it at the same time; the others wait.

        Args:
            make: gives the value and its bytes. What it raises, everybody who waits raises, and nothing is kept.
        """

    def status(self) -> ObjectCacheStatus:
        """Sizes and counts."""
