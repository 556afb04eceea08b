"""A request that has not ended, as the generation loop knows it: its text so far, its consumer, its times.

Refuses to know about steps and blocks; ``engine.py`` owns these requests.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from troth.contracts.events import Event, Timings, Usage
from troth.contracts.request import Request
from troth.run.emit import Emitter


class Sink(Protocol):
    """Where a request's events go."""

    @property
    def last_read(self) -> float:
        """When the consumer last took an event, on the engine's clock."""

    def offer(self, event: Event) -> bool:
        """Queue an event; whether there is room for more."""


@dataclass(slots=True)
class LiveRequest:
    """What the loop keeps of a request until it ends. Times are on the engine's clock."""

    request: Request
    emitter: Emitter
    sink: Sink
    added_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_prefilled: int = 0
    num_cached: int = 0
    held: bool = False
    compilation: Future[object] | None = None
    """Of the request's grammar, while it is under way; the request is not planned for before."""
    restoring: bool = False
    """Whether it waits for what the disk tier has of its prompt."""

    @property
    def waits(self) -> bool:
        """Whether it is not to be planned for."""
        return self.held or self.restoring or self.compilation is not None

    def has_room_to_close(self, limit: int) -> bool:
        """Whether admission left room for the tokens that close reasoning, in ``limit`` tokens.

        A long prompt, or a limit that the client named, may leave none.
        """
        reading = self.request.reading
        if reading is None:
            return False
        return len(self.request.prompt_ids) + (self.request.max_tokens or 1) + len(reading.close_ids) <= limit

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            num_prompt_tokens=len(self.request.prompt_ids),
            num_completion_tokens=self.emitter.num_emitted,
            num_cached_tokens=self.num_cached,
            num_reasoning_tokens=self.emitter.num_reasoning_tokens,
        )

    def timings(self, now: float) -> Timings:
        """Seconds so far."""
        started = self.started_at if self.started_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        last = self.last_token_at if self.last_token_at is not None else first
        return Timings(queued_s=started - self.added_at, prefill_s=max(0.0, first - started), decode_s=last - first)
