"""The events of one request between an engine handle and its single consumer.

Refuses to know where events come from. The producer keeps the queue, the consumer keeps the stream; when the consumer
drops the stream, the request is cancelled. Read next: ``isolate.py``.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Self

from troth.contracts.events import Completed, Event, Failed, Segment
from troth.contracts.names import RequestId
from troth.errors import StreamProtocol


class TokenCount:
    """How many tokens each event of one request adds; Segment carries a running total."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0

    def added_by(self, event: Event) -> int:
        """Tokens first accounted for by ``event``; call once per event, in order."""
        if type(event) is not Segment or event.num_completion_tokens <= self.total:
            return 0
        added = event.num_completion_tokens - self.total
        self.total = event.num_completion_tokens
        return added


class EventQueue:
    """The producer's end. Lives on the event loop it was created on; only what ``QueuedEvents`` asks may come from
    another thread.

    Args:
        request_id: the request the events belong to.
        on_taken: called with each event when the consumer takes it.
        on_cancel: called on the loop, at most once, with the reason, while the request has not ended.
        on_end_reasoning: called on the loop while the request has not ended.
    """

    def __init__(
        self,
        request_id: RequestId,
        *,
        on_taken: Callable[[Event], None] = lambda event: None,
        on_cancel: Callable[[str], None] = lambda reason: None,
        on_end_reasoning: Callable[[], None] = lambda: None,
    ) -> None:
        self.request_id = request_id
        self.ended = False
        """Whether the last event was put."""
        self._events: deque[Event] = deque()
        self._on_taken = on_taken
        self._on_cancel = on_cancel
        self._on_end_reasoning = on_end_reasoning
        self._cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def num_queued(self) -> int:
        """Events put and not yet taken."""
        return len(self._events)

    def put(self, event: Event) -> None:
        """Append an event; after Completed or Failed nothing more is taken in."""
        if self.ended:
            return
        self.ended = type(event) is Completed or type(event) is Failed
        self._events.append(event)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def stream(self) -> QueuedEvents:
        """The consumer's end; ask once."""
        return QueuedEvents(self)

    async def _take(self) -> Event:
        while not self._events:
            if self.ended:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise StreamProtocol(f"request {self.request_id} is read by two consumers at once")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._events.popleft()
        self._on_taken(event)
        return event

    def _cancel(self, reason: str) -> None:
        self._on_loop(self._cancel_here, reason)

    def _end_reasoning(self) -> None:
        self._on_loop(self._end_reasoning_here)

    def _on_loop(self, work: Callable[..., None], *arguments: str) -> None:
        if threading.get_ident() == self._thread:
            work(*arguments)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work, *arguments)

    def _end_reasoning_here(self) -> None:
        if not self.ended and not self._cancelled:
            self._on_end_reasoning()

    def _cancel_here(self, reason: str) -> None:
        if not self.ended and not self._cancelled:
            self._cancelled = True
            self._on_cancel(reason)


class QueuedEvents:
    """The consumer's end: an EventStream. Dropping it cancels the request."""

    __slots__ = ("_queue",)

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue

    @property
    def request_id(self) -> RequestId:
        """The request this stream belongs to."""
        return self._queue.request_id

    def __aiter__(self) -> Self:
        """The stream itself."""
        return self

    def __anext__(self) -> Coroutine[None, None, Event]:
        """The next event; StopAsyncIteration after Completed or Failed."""
        return self._queue._take()

    def end_reasoning(self) -> None:
        """Ask the producer to close the answer's reasoning. Any thread."""
        self._queue._end_reasoning()

    def cancel(self, reason: str = "requested") -> None:
        """Ask the producer to stop. Idempotent, any thread."""
        self._queue._cancel(reason)

    def __del__(self) -> None:
        self._queue._cancel("disconnected")
