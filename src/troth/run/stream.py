"""The events of one request on their way from the engine's thread to one consumer, in any thread or event loop.

The queue is bounded softly: the producer never blocks, it is told when there is no room and holds the row instead. The
terminal event always gets through. Dropping the stream cancels the request.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from troth.contracts.events import Completed, Event, Failed, Segment
from troth.contracts.names import RequestId
from troth.contracts.ports import Clock
from troth.errors import DeviceError, StreamProtocol

MAX_EVENTS: Final = 32
MAX_TOKENS: Final = 256


class EventChannel:
    """The queue between the engine and one consumer. The engine holds this end, never the consumer's handle.

    Args:
        clock: the engine's.
        whole: whether the consumer reads the answer only when it has ended. It is not woken before, and there is
            always room: the answer is as long as it is, and nobody waits for its parts.
    """

    def __init__(self, clock: Clock, *, whole: bool = False) -> None:
        self._clock = clock
        self._whole = whole
        self._events: deque[tuple[Event, int]] = deque()
        """Events with the tokens each one adds."""
        self._num_tokens = 0
        self._num_offered_tokens = 0
        self._full = False
        self._changed = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.ended = False
        """Whether the terminal event was offered."""
        self.last_read = clock()
        """When the consumer last took an event."""

    def offer(self, event: Event) -> bool:
        """Queue an event; whether the consumer has room for more. Events after the terminal one are dropped."""
        with self._changed:
            if self.ended:
                return True
            added = 0
            if isinstance(event, Segment):
                added = event.num_completion_tokens - self._num_offered_tokens
                self._num_offered_tokens = event.num_completion_tokens
            self._events.append((event, added))
            self._num_tokens += added
            self.ended = isinstance(event, Completed | Failed)
            if self._whole and not self.ended:
                return True
            self._full = len(self._events) >= MAX_EVENTS or self._num_tokens >= MAX_TOKENS
            self._changed.notify_all()
            if self._waiter is not None:
                loop, future = self._waiter
                self._waiter = None
                _wake(loop, future)
            return not self._full

    def take(self) -> tuple[Event, bool] | None:
        """The next event, waiting for it, and whether taking it made room again; None after the terminal event."""
        with self._changed:
            while not self._is_ready:
                if self.ended:
                    return None
                self._changed.wait()
            return self._pop()

    async def take_async(self) -> tuple[Event, bool] | None:
        """As ``take``, without blocking the event loop."""
        while True:
            with self._changed:
                if self._is_ready:
                    return self._pop()
                if self.ended:
                    return None
                if self._waiter is not None and not self._waiter[1].done():
                    raise StreamProtocol("a request's events are read by two consumers at once")
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiter = (future.get_loop(), future)
            await future

    @property
    def _is_ready(self) -> bool:
        return bool(self._events) and (self.ended or not self._whole)

    def _pop(self) -> tuple[Event, bool]:
        event, added = self._events.popleft()
        self._num_tokens -= added
        self.last_read = self._clock()
        # Half-empty before the row resumes: one event of room at a time would switch the row on and off each step.
        made_room = self._full and len(self._events) <= MAX_EVENTS // 2 and self._num_tokens <= MAX_TOKENS // 2
        if made_room:
            self._full = False
        return event, made_room


class RequestStream:
    """The consumer's handle: an EventStream that can also be iterated in a blocking way. Dropping it cancels.

    Args:
        request_id: whose events these are.
        channel: where they come from.
        on_cancel: called at most once, from any thread, with the reason.
        on_end_reasoning: called from any thread, to close the answer's reasoning.
        on_room: called when the consumer made room after ``offer`` had said there was none.
    """

    def __init__(
        self,
        request_id: RequestId,
        channel: EventChannel,
        *,
        on_cancel: Callable[[RequestId, str], None],
        on_room: Callable[[RequestId], None],
        on_end_reasoning: Callable[[RequestId], None],
    ) -> None:
        self._request_id = request_id
        self._channel = channel
        self._on_cancel = on_cancel
        self._on_room = on_room
        self._on_end_reasoning = on_end_reasoning
        self._cancelled = False
        self._process_id = os.getpid()

    @property
    def request_id(self) -> RequestId:
        """The request this stream belongs to."""
        return self._request_id

    def cancel(self, reason: str = "requested") -> None:
        """As contracts.ports.EventStream."""
        if not self._cancelled and not self._channel.ended:
            self._cancelled = True
            self._on_cancel(self._request_id, reason)

    def end_reasoning(self) -> None:
        """As contracts.ports.EventStream."""
        if not self._channel.ended:
            self._on_end_reasoning(self._request_id)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        self._require_own_process()
        taken = self._channel.take()
        if taken is None:
            raise StopIteration
        return self._taken(taken)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        self._require_own_process()
        taken = await self._channel.take_async()
        if taken is None:
            raise StopAsyncIteration
        return self._taken(taken)

    def _require_own_process(self) -> None:
        """Raise DeviceError in a fork of the engine's process: no event would ever come."""
        if os.getpid() != self._process_id:
            raise DeviceError(f"this answer goes to process {self._process_id}, of which this one is a fork")

    def _taken(self, taken: tuple[Event, bool]) -> Event:
        event, made_room = taken
        if made_room:
            self._on_room(self._request_id)
        return event

    def __del__(self) -> None:
        self.cancel("disconnected")


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, future)
    except RuntimeError:
        pass  # the loop was closed: nobody is left to be woken


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
