"""An engine in a process of its own, seen as an EngineClient.

Owns the process, its socket and its restarts; refuses to know HTTP and what the engine is made of. A crash of the
process fails its requests and nothing else. Read next: ``child.py``, ``wire.py``, ``engine_process.py``.

    states: loading -> ready <-> unresponsive
            ready, unresponsive -> (crash) loading ... -> failed
            any of them -> closed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from troth.contracts.events import Event
from troth.contracts.failures import failure_event
from troth.contracts.ports import EngineInfo, EngineStatus
from troth.contracts.request import Request
from troth.errors import (
    Cancelled,
    DeviceError,
    ModelLoadError,
    NotReady,
    OptionError,
    StreamProtocol,
    TrothError,
)
from troth.runtime.child import EngineChild, cause_of
from troth.runtime.event_queue import EventQueue, QueuedEvents, TokenCount
from troth.runtime.wire import (
    BEAT_S,
    WINDOW_EVENTS,
    WINDOW_TOKENS,
    WIRE_VERSION,
    AskStatus,
    Cancel,
    Close,
    Closed,
    Credit,
    EndReasoning,
    Events,
    Hello,
    LoadFailed,
    Loading,
    Ready,
    Status,
    Submit,
    ToEngine,
    Unpin,
    decode_to_server,
    encode,
)

_log = logging.getLogger(__name__)
_LOAD_ERRORS: Final[dict[str, type[TrothError]]] = {
    "ModelLoadError": ModelLoadError,
    "OptionError": OptionError,
    "NotReady": NotReady,
    # What an engine is asked for before it has a request is in its options, and whoever wrote those must act.
    "CapabilityUnavailable": OptionError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a crashed engine process is started again. A failed load never is: it would fail the same way."""

    max_restarts: int = 3
    """Restarts within ``window_s`` after which the engine stays failed; 0: never restart."""
    window_s: float = 60.0
    early_s: float = 10.0
    """A process that died sooner than this after its start ..."""
    early_delay_s: float = 5.0
    """... is started again after this long."""


NEVER_RESTART: Final = RestartPolicy(max_restarts=0)


class ProcessEngineClient:
    """An EngineClient whose engine runs in a child process.

    Lives on one event loop: ``start`` and everything after it are called there; what ``QueuedEvents`` asks may come
    from any thread.

    Args:
        factory: ``package.module:function``, an ``engine_process.EngineFactory``.
        options: its JSON-able options.
        name: the engine's name in messages.
        restart: what to do when the process dies.
        close_timeout_s: how long ``aclose`` waits for the process to end by itself before it is killed.
        status_timeout_s: how long ``status`` waits for an answer.
        silence_s: a ready process that says nothing for this long counts as unresponsive until it speaks again; a
            living one speaks every ``wire.BEAT_S``.
    """

    def __init__(
        self,
        factory: str,
        options: Mapping[str, Any],
        *,
        name: str = "engine",
        restart: RestartPolicy = NEVER_RESTART,
        close_timeout_s: float = 10.0,
        status_timeout_s: float = 5.0,
        silence_s: float = 10.0,
    ) -> None:
        self._factory = factory
        self._options = dict(options)
        self._name = name
        self._restart = restart
        self._close_timeout_s = close_timeout_s
        self._status_timeout_s = status_timeout_s
        self._max_silent_beats = max(1, round(silence_s / BEAT_S))
        self._num_silent_beats = 0
        self._beat_timer: asyncio.TimerHandle | None = None
        self._state: Literal["loading", "ready", "failed", "closed"] = "loading"
        self._progress = ""
        self._info: EngineInfo | None = None
        self._error: TrothError | None = None
        self._child: EngineChild | None = None
        self._settled = asyncio.Event()
        self._restarts: deque[float] = deque()
        self._starts_steps: dict[int, EventQueue] = {}
        self._asks: dict[int, asyncio.Future[EngineStatus]] = {}
        self._last_number = 0
        self._grants: list[tuple[int, int, int]] = []
        self._restart_timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the process on the running loop and return at once; ``ready`` waits for it. Call once."""
        assert self._child is None, "start is called once"
        self._loop = asyncio.get_running_loop()
        self._spawn()
        self._beat()

    async def ready(self) -> EngineInfo:
        """Wait until the engine takes requests. Raises what made it fail."""
        await self._settled.wait()
        return self.info

    @property
    def state(self) -> str:
        """loading, ready, unresponsive, failed or closed."""
        return "unresponsive" if self._is_unresponsive else self._state

    @property
    def process_id(self) -> int | None:
        """The child's process id while one runs."""
        return self._child.pid if self._child is not None else None

    @property
    def info(self) -> EngineInfo:
        """What the engine is.

        Raises NotReady while loading, unresponsive or closed, and the error that made it fail.
        """
        if self._state == "ready" and self._info is not None and not self._is_unresponsive:
            return self._info
        raise self._refusal()

    def submit(self, request: Request) -> QueuedEvents:
        """Hand a request over; refusals arrive as the stream's first event."""
        self._last_number += 1
        number, count = self._last_number, TokenCount()
        taken_events = taken_tokens = 0

        def on_taken(event: Event) -> None:
            nonlocal taken_events, taken_tokens
            taken_events += 1
            taken_tokens += count.added_by(event)
            if taken_events * 2 >= WINDOW_EVENTS or taken_tokens * 2 >= WINDOW_TOKENS:
                self._grant(number, taken_events, taken_tokens)
                taken_events = taken_tokens = 0

        def on_cancel(reason: str) -> None:
            if number in self._starts_steps:
                self._send(Cancel(number, reason))

        def on_end_reasoning() -> None:
            if number in self._starts_steps:
                self._send(EndReasoning(number))

        queue = EventQueue(
            request.request_id, on_taken=on_taken, on_cancel=on_cancel, on_end_reasoning=on_end_reasoning
        )
        if self.state == "ready":
            self._starts_steps[number] = queue
            self._send(Submit(number, request))
        else:
            queue.put(failure_event(self._refusal()))
        return queue.stream()

    def unpin(self, name: str) -> None:
        """As contracts.ports.EngineClient; an engine that is not ready has no pins."""
        if self._state == "ready":
            self._send(Unpin(name))

    async def status(self) -> EngineStatus:
        """What the engine is doing; zeros while it is not ready. Raises NotReady without a timely answer."""
        if self._state != "ready":
            return _idle_status(self._state)
        if self._is_unresponsive:
            raise self._refusal()
        self._last_number += 1
        ask = self._last_number
        answer = self._asks[ask] = self._loop.create_future()
        self._send(AskStatus(ask))
        try:
            return await asyncio.wait_for(answer, self._status_timeout_s)
        except TimeoutError:
            raise NotReady(
                f"{self._name}: engine process {self.process_id} gave no status within "
                f"{self._status_timeout_s:g} s; it may hang"
            ) from None
        finally:
            del self._asks[ask]

    async def aclose(self) -> None:
        """Stop the process: running requests end with Failed(Cancelled), memory is given back. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for timer in (self._restart_timer, self._beat_timer):
            if timer is not None:
                timer.cancel()
        self._state = "closed"
        if (child := self._child) is not None:
            self._send(Close())
            await child.stop(self._close_timeout_s)
            self._dispose(child)
        self._end_requests(Cancelled("engine_closed"))
        self._settled.set()

    def _spawn(self) -> None:
        self._restart_timer = None
        try:
            self._child = EngineChild(self._factory, self._options, self._receive, self._on_exit)
        except OSError as error:
            self._fail(DeviceError(f"{self._name}: no process for the engine: {error}"))

    def _dispose(self, child: EngineChild) -> None:
        child.dispose()
        self._child = None

    @property
    def _is_unresponsive(self) -> bool:
        return self._state == "ready" and self._num_silent_beats >= self._max_silent_beats

    def _beat(self) -> None:
        """Count a beat without a word. Beats of this loop and not seconds: a server that was stopped, or suspended
        with its machine, must not take that for its engine's silence.
        """
        self._num_silent_beats += 1
        if self._num_silent_beats == self._max_silent_beats and self._is_unresponsive:
            _log.warning("%s", self._refusal())
        self._beat_timer = self._loop.call_later(BEAT_S, self._beat)

    def _receive(self, frame: bytes) -> None:
        self._num_silent_beats = 0
        match decode_to_server(frame):
            case Events(items):
                for one in items:
                    if (queue := self._starts_steps.get(one.stream)) is not None:
                        queue.put(one.event)
                        if queue.ended:
                            del self._starts_steps[one.stream]
            case Status(ask, status):
                if (answer := self._asks.get(ask)) is not None and not answer.done():
                    answer.set_result(status)
            case Hello(version) if version != WIRE_VERSION:
                self._refuse_version(version)
            case Loading(stage, done, total):
                self._progress = f"{stage} {100 * done // total} %" if total else stage
            case Ready(info) if self._state == "loading":
                self._info, self._state = info, "ready"
                self._settled.set()
            case LoadFailed(kind, message):
                self._fail(_LOAD_ERRORS.get(kind, DeviceError)(message))
            case Closed() if self._child is not None:
                self._child.last_frame_came()

    def _refuse_version(self, version: int) -> None:
        assert self._child is not None, "only a child says hello"
        self._fail(
            StreamProtocol(
                f"{self._name}: engine process {self._child.pid} speaks wire version {version}, this server "
                f"{WIRE_VERSION}; restart the server, troth was upgraded under it"
            )
        )
        # It may not understand Close either.
        self._child.kill()

    def _on_exit(self, exit_code: int) -> None:
        child = self._child
        if child is None or self._state == "closed":
            return
        self._dispose(child)
        if self._state == "failed":
            return
        error = DeviceError(f"{self._name}: engine process died ({cause_of(exit_code)}, pid {child.pid})")
        _log.error("%s", error)
        self._end_requests(error)
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._restart.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._restart.max_restarts:
            self._fail(error)
            return
        self._restarts.append(now)
        self._settled.clear()
        self._state, self._progress = "loading", "restarting after a crash"
        early = now - child.started < self._restart.early_s
        delay_s = self._restart.early_delay_s if early else 0.0
        self._restart_timer = self._loop.call_later(delay_s, self._spawn)

    def _fail(self, error: TrothError) -> None:
        if self._state != "closed":
            self._state, self._error = "failed", error
            self._end_requests(error)
            self._settled.set()
            # A process that could not load waits for this before it exits, so that its reason is never lost.
            self._send(Close())

    def _end_requests(self, error: TrothError) -> None:
        queues, self._starts_steps = self._starts_steps, {}
        for queue in queues.values():
            queue.put(failure_event(error))
        self._grants.clear()
        for answer in self._asks.values():
            if not answer.done():
                answer.set_result(_idle_status(self._state))

    def _refusal(self) -> TrothError:
        if self._state == "failed" and self._error is not None:
            return self._error
        if self._state == "closed":
            return NotReady(f"{self._name} is closed")
        if self._is_unresponsive:
            return NotReady(
                f"{self._name}: engine process {self.process_id} has said nothing for "
                f"{self._num_silent_beats * BEAT_S:g} s; it may hang or be stopped"
            )
        progress = f" ({self._progress})" if self._progress else ""
        return NotReady(f"{self._name} is loading{progress}; try again in a moment")

    def _grant(self, number: int, num_events: int, num_tokens: int) -> None:
        if number not in self._starts_steps:
            return
        # Consumers that one engine step woke run in the same turn of the loop; their credit makes one frame.
        if not self._grants:
            self._loop.call_soon(self._send_grants)
        self._grants.append((number, num_events, num_tokens))

    def _send_grants(self) -> None:
        if self._grants:
            grants, self._grants = self._grants, []
            self._send(Credit(grants))

    def _send(self, message: ToEngine) -> None:
        if self._child is not None:
            self._child.send(encode(message))


def _idle_status(state: str) -> EngineStatus:
    return EngineStatus(
        state=state,
        num_running=0,
        num_waiting=0,
        num_steps=0,
        blocks_used=(),
        blocks_free=(),
        num_prompt_tokens=0,
        num_completion_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        num_requests_by_end={},
    )
