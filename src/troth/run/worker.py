"""One dedicated thread around an ``EngineLoop``, and the handle that other threads and event loops use.

``EngineThread`` is the library's EngineClient. Callers only queue commands; the thread alone touches scheduler and
runner.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from troth.contracts.failures import failure_event
from troth.contracts.names import RequestId
from troth.contracts.ports import Clock, EngineInfo, EngineStatus
from troth.contracts.request import Request
from troth.errors import Cancelled, DeviceError, RequestError, TrothError
from troth.run.engine import EngineLoop
from troth.run.stream import EventChannel, RequestStream

_log = logging.getLogger("troth")

IDLE_CHECK_S: Final = 0.5
"""How often held requests are checked for consumers that went away."""


class EngineThread:
    """Runs an engine and serves it to any thread.

    Args:
        loop: the engine; from now on only this thread's.
        info: what the engine is.
        clock: the loop's clock.
        downgrades: asked for each status.
    """

    def __init__(
        self,
        loop: EngineLoop,
        info: EngineInfo,
        *,
        clock: Clock,
        downgrades: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._loop = loop
        self._info = info
        self._clock = clock
        self._downgrades = downgrades
        self._commands: deque[Callable[[], None]] = deque()
        self._gate = threading.RLock()
        """Guards ``_closing`` with the appends, so that no command is queued after the last look. Reentrant: a dropped
        stream may be collected, and cancel, while this thread holds it.
        """
        self._wake = threading.Event()
        self._closing = False
        self._failure: TrothError | None = None
        self._thread = threading.Thread(target=self._run, name="troth-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """As contracts.ports.EngineClient."""
        return self._info

    def submit(self, request: Request) -> RequestStream:
        """As contracts.ports.EngineClient; the stream can also be read by blocking."""
        channel = EventChannel(self._clock)
        if refusal := _unknown_token(request, self._info.vocab_size):
            channel.offer(failure_event(refusal))
        elif not self._post(lambda: self._add(request, channel)):
            channel.offer(failure_event(self._failure or Cancelled("engine_closed")))
        return RequestStream(request.request_id, channel, on_cancel=self._cancel, on_room=self._has_room)

    def status_now(self, timeout_s: float = 5.0) -> EngineStatus:
        """A snapshot, waiting for the step under way.

        Raises:
            DeviceError: the engine did not answer in time.
        """
        answer: deque[EngineStatus] = deque()
        ready = threading.Event()

        def ask() -> None:
            answer.append(self._loop.status("ready", self._downgrades()))
            ready.set()

        if not self._post(ask):
            state = "failed" if self._failure else "closed"
            return self._loop.status(state, self._downgrades())
        if not ready.wait(timeout_s):
            raise DeviceError(f"the engine did not answer within {timeout_s:g} s")
        return answer[0]

    async def status(self) -> EngineStatus:
        """As contracts.ports.EngineClient."""
        return await asyncio.to_thread(self.status_now)

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop after the step under way; running requests end with Failed(Cancelled). Idempotent."""
        with self._gate:
            self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    async def aclose(self) -> None:
        """As contracts.ports.EngineClient."""
        await asyncio.to_thread(self.close)

    def _add(self, request: Request, channel: EventChannel) -> None:
        try:
            self._loop.add(request, channel)
        # The edge of a request: a bug that it hits must not end the others, nor leave its consumer waiting.
        except Exception as error:
            _log.exception("taking in request %s failed", request.request_id)
            channel.offer(failure_event(DeviceError(f"the request could not be taken in: {error!r}")))

    def _cancel(self, request_id: RequestId, reason: str) -> None:
        self._post(lambda: self._loop.cancel(request_id, reason))

    def _has_room(self, request_id: RequestId) -> None:
        self._post(lambda: self._loop.has_room(request_id))

    def _post(self, command: Callable[[], None]) -> bool:
        """Queue a command for the thread; False when it will never run."""
        with self._gate:
            if self._closing:
                return False
            self._commands.append(command)
        self._wake.set()
        return True

    def _run(self) -> None:
        next_check = self._clock() + IDLE_CHECK_S
        try:
            while not self._closing:
                self._wake.clear()
                self._take_commands()
                busy = self._loop.step()
                if self._clock() >= next_check:
                    self._loop.cancel_idle_consumers()
                    next_check = self._clock() + IDLE_CHECK_S
                if not busy and not self._commands:
                    self._wake.wait(IDLE_CHECK_S)
        except Exception as error:
            # A bug in the loop: fail every request with it rather than leave them waiting for ever.
            _log.exception("the engine loop failed")
            self._failure = error if isinstance(error, TrothError) else DeviceError(f"the engine failed: {error!r}")
        finally:
            with self._gate:
                self._closing = True
            self._take_commands()
            self._loop.close(self._failure)

    def _take_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()


def _unknown_token(request: Request, vocab_size: int) -> RequestError | None:
    """Why a request cannot be computed: its tokens would index past the model's tables, and fail the whole step."""
    named = {"prompt": request.prompt_ids, "logit_bias": [token_id for token_id, _ in request.sampling.logit_bias]}
    for field, ids in named.items():
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < vocab_size:
                message = f"{field} has token id {token_id}; this model's are 0 to {vocab_size - 1}"
                return RequestError(message, param=field)
    return None
