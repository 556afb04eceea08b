"""What the generation loop asks of a disk tier; ``disk_cache.py`` has the real one.

Without tensors, so that the loop is tested where there are none. The engine's thread makes every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from troth.contracts.names import RequestId
from troth.contracts.prefix_cache import DiskCacheStatus
from troth.contracts.request import Request


class DiskPort(Protocol):
    """What outlives the prompt cache in memory."""

    def begin(self, request: Request) -> bool:
        """A request came: whether it should wait."""

    def is_waiting(self, request_id: RequestId) -> bool:
        """Whether a request should still wait."""

    def forget(self, request_id: RequestId) -> None:
        """A request ended."""

    def withdraw(self, request: Request) -> None:
        """A request's row failed by itself."""

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """So long did a prompt take."""

    def work(self) -> bool:
        """Do what is due between two steps; whether there is more to come."""

    def wait(self, others: Sequence[Future[Any]], timeout_s: float) -> None:
        """Wait until there is more to do, here or for ``others``."""

    def status(self) -> DiskCacheStatus:
        """A snapshot."""

    def close(self, *, keep: bool = True) -> None:
        """End, with what rows left behind kept or not."""
