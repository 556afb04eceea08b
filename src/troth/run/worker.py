"""One dedicated thread around an ``EngineLoop``, and the handle that other threads and event loops use.

``EngineThread`` is the library's EngineClient. Callers only queue commands; the thread alone touches scheduler and
runner.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Final

from troth.contracts.failures import failure_event
from troth.contracts.names import RequestId
from troth.contracts.ports import Clock, EngineInfo, EngineStatus
from troth.contracts.request import Request
from troth.errors import Cancelled, DeviceError, RequestError, TrothError
from troth.run.emit import Emitter
from troth.run.engine import EngineLoop
from troth.run.stream import EventChannel, RequestStream

_log = logging.getLogger("troth")

IDLE_CHECK_S: Final = 0.5
"""How often held requests are checked for consumers that went away."""
REST_S: Final = 2.0
"""So long after the last step idle work begins: a request that follows another, or the start, must not wait for it."""


class EngineThread:
    """Runs an engine and serves it to any thread.

    Args:
        loop: the engine; from now on only this thread's.
        info: what the engine is.
        clock: the loop's clock.
        downgrades: asked for each status.
        idle_work: what the thread does, piece by piece, while there is no step to compute; None: nothing.
    """

    def __init__(
        self,
        loop: EngineLoop,
        info: EngineInfo,
        *,
        clock: Clock,
        downgrades: Callable[[], tuple[str, ...]] = tuple,
        idle_work: Iterable[None] | None = None,
    ) -> None:
        self._loop = loop
        self._info = info
        self._clock = clock
        self._downgrades = downgrades
        self._idle_work: Iterator[None] | None = iter(idle_work) if idle_work is not None else None
        self._idle_failure: str | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """Reentrant, as is the gate: a dropped stream may be collected, and cancel, while this thread is in either."""
        self._gate = threading.RLock()
        """Guards ``_closing`` with the puts, so that no command is queued after the last look."""
        self._process_id = os.getpid()
        self._closing = False
        self._failure: TrothError | None = None
        self._thread = threading.Thread(target=self._run, name="troth-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """As contracts.ports.EngineClient."""
        return self._info

    def submit(self, request: Request, *, whole: bool = False) -> RequestStream:
        """As contracts.ports.EngineClient; the stream can also be read by blocking.

        Args:
            request: from now on the engine's.
            whole: whether its events are read only when it has ended.
        """
        channel = EventChannel(self._clock, whole=whole)
        try:
            _require_known_tokens(request, self._info.vocab_size)
            # Here, in the caller's thread: a step must not wait for the schemas of somebody's tools.
            emitter = self._loop.emitter(request, whole=whole)
        except RequestError as refusal:
            channel.offer(failure_event(refusal))
        # The edge of a request, as in ``_add``.
        except Exception as error:
            _log.exception("reading request %s failed", request.request_id)
            channel.offer(failure_event(DeviceError(f"the request could not be read: {error!r}")))
        else:
            if not self._post(lambda: self._add(request, channel, emitter)):
                channel.offer(failure_event(self._why_gone()))
        return RequestStream(
            request.request_id,
            channel,
            on_cancel=self._cancel,
            on_room=self._has_room,
            on_end_reasoning=self._end_reasoning,
        )

    def unpin(self, name: str) -> None:
        """As contracts.ports.EngineClient."""
        self._post(lambda: self._loop.unpin(name))

    def status_now(self, timeout_s: float = 5.0) -> EngineStatus:
        """A snapshot, waiting for the step under way.

        Raises:
            DeviceError: the engine did not answer in time, or runs in another process.
        """
        if self._is_elsewhere:
            raise self._why_gone()
        answer: deque[EngineStatus] = deque()
        ready = threading.Event()

        def ask() -> None:
            answer.append(self._loop.status("ready", self._all_downgrades()))
            ready.set()

        if not self._post(ask):
            state = "failed" if self._failure else "closed"
            return self._loop.status(state, self._all_downgrades())
        if not ready.wait(timeout_s):
            raise DeviceError(f"the engine did not answer within {timeout_s:g} s")
        return answer[0]

    async def status(self) -> EngineStatus:
        """As contracts.ports.EngineClient."""
        return await asyncio.to_thread(self.status_now)

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop after the step under way; running requests end with Failed(Cancelled). Idempotent.

        In a fork of the process it does nothing: the engine is the parent's.
        """
        if self._is_elsewhere:
            return
        with self._gate:
            self._closing = True
        self._commands.put(_wake_up)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    async def aclose(self) -> None:
        """As contracts.ports.EngineClient."""
        await asyncio.to_thread(self.close)

    @property
    def has_idle_work(self) -> bool:
        """Whether something is left to do while there is no step to compute."""
        return self._idle_work is not None

    def _all_downgrades(self) -> tuple[str, ...]:
        return self._downgrades() + (() if self._idle_failure is None else (self._idle_failure,))

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this is a fork of the engine's process: its thread is not here, and its locks may be held."""
        return os.getpid() != self._process_id

    def _why_gone(self) -> TrothError:
        if self._is_elsewhere:
            return DeviceError(
                f"the engine runs in process {self._process_id}, of which this one is a fork; open an engine here"
            )
        return self._failure or Cancelled("engine_closed")

    def _add(self, request: Request, channel: EventChannel, emitter: Emitter) -> None:
        try:
            self._loop.add(request, channel, emitter)
        # The edge of a request: a bug that it hits must not end the others, nor leave its consumer waiting.
        except Exception as error:
            _log.exception("taking in request %s failed", request.request_id)
            channel.offer(failure_event(DeviceError(f"the request could not be taken in: {error!r}")))

    def _cancel(self, request_id: RequestId, reason: str) -> None:
        self._post(lambda: self._loop.cancel(request_id, reason))

    def _end_reasoning(self, request_id: RequestId) -> None:
        self._post(lambda: self._loop.end_reasoning(request_id))

    def _has_room(self, request_id: RequestId) -> None:
        self._post(lambda: self._loop.has_room(request_id))

    def _post(self, command: Callable[[], None]) -> bool:
        """Queue a command for the thread; False when it will never run."""
        if self._is_elsewhere:
            return False
        with self._gate:
            if self._closing:
                return False
            self._commands.put(command)
        return True

    def _run(self) -> None:
        last_step = self._clock()
        next_check = last_step + IDLE_CHECK_S
        try:
            while not self._closing:
                self._take_commands()
                busy = self._loop.step()
                if self._clock() >= next_check:
                    self._loop.cancel_idle_consumers()
                    self._loop.follow_memory()
                    next_check = self._clock() + IDLE_CHECK_S
                if busy:
                    last_step = self._clock()
                elif self._clock() < last_step + REST_S or not self._work_idly():
                    self._take_commands(wait_s=IDLE_CHECK_S)
        except Exception as error:
            # A bug in the loop: fail every request with it rather than leave them waiting for ever.
            _log.exception("the engine loop failed")
            self._failure = error if isinstance(error, TrothError) else DeviceError(f"the engine failed: {error!r}")
        finally:
            with self._gate:
                self._closing = True
            self._idle_work = None  # it may hold the weights
            self._end()

    def _work_idly(self) -> bool:
        """A piece of what waits for an idle engine; False when nothing is left of it."""
        if self._idle_work is None:
            return False
        try:
            next(self._idle_work)
        except StopIteration:
            self._idle_work = None
        except Exception as error:
            # Nobody asked for it, so nobody fails with it; a device that is lost fails the next step.
            _log.exception("work of an idle engine failed")
            self._idle_failure = (
                f"work of an idle engine failed ({error!r}): kernels may be compiled while requests wait"
            )
            self._idle_work = None
        return self._idle_work is not None

    def _take_commands(self, wait_s: float = 0.0) -> None:
        """Run what is queued; wait for the first command if there is none."""
        try:
            command = self._commands.get(block=wait_s > 0, timeout=wait_s)
            while True:
                command()
                command = self._commands.get_nowait()
        except Empty:
            return

    def _end(self) -> None:
        """Run what was queued before the end, so that whoever waits for it hears of the end, and close the loop."""
        while not self._commands.empty():
            self._log_bugs_of(self._take_commands)
        self._log_bugs_of(lambda: self._loop.close(self._failure))

    def _log_bugs_of(self, work: Callable[[], None]) -> None:
        """What ended the loop may be in the way of its end, too; the rest of it must happen all the same."""
        try:
            work()
        except Exception:
            _log.exception("ending the engine failed")


def _wake_up() -> None:
    """The command that does nothing."""


def _require_known_tokens(request: Request, vocab_size: int) -> None:
    """Refuse what cannot be computed: its tokens would index past the model's tables, and fail the whole step."""
    named: dict[str, Sequence[int]] = {
        "prompt": request.prompt_ids,
        "logit_bias": [token_id for token_id, _ in request.sampling.logit_bias],
        "close_ids": request.reading.close_ids if request.reading is not None else (),
    }
    for field, ids in named.items():
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < vocab_size:
                message = f"{field} has token id {token_id}; this model's are 0 to {vocab_size - 1}"
                raise RequestError(message, param=field)
