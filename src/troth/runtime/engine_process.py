"""The main of an engine process: builds an engine by import path and serves it over one socket.

Refuses to know what the engine is made of (``contracts/ports.py`` is all it sees) and what HTTP is. It ends when
asked to or when the server that started it is gone. Read next: ``isolate.py``, the other end.

Run as ``python -m troth.runtime.engine_process`` with one line of JSON (``EngineSpec``) on standard input. The input
then stays open: its end is the death of the server.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import msgspec
import zmq

from troth.contracts.events import Completed, Event, Failed
from troth.contracts.failures import failure_event
from troth.contracts.ports import EngineClient, EngineStatus, EventStream
from troth.contracts.request import Request
from troth.errors import DeviceError, OptionError, StreamProtocol, TrothError
from troth.runtime.event_queue import TokenCount
from troth.runtime.frame_socket import FrameSocket, open_socket
from troth.runtime.wire import (
    BEAT_S,
    WINDOW_EVENTS,
    WINDOW_TOKENS,
    WIRE_VERSION,
    Alive,
    AskStatus,
    Cancel,
    Close,
    Closed,
    Credit,
    EndReasoning,
    Events,
    Hello,
    Item,
    LoadFailed,
    Loading,
    Ready,
    Status,
    Submit,
    ToServer,
    Unpin,
    decode_to_engine,
    encode,
    item,
)

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG: Final = 1
_FLUSH_S: Final = 2.0
"""Longest wait for the last messages to reach the server before the process exits."""


class LoadReport(Protocol):
    """Called by a factory as it works; any thread."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` units of ``stage``; ``total`` 0 means unknown."""


class EngineFactory(Protocol):
    """What an import path in EngineSpec must name. Called once, in a worker thread, and may take as long as it needs.

    The engine's ``submit``, ``status`` and ``aclose`` are then called on the process's event loop.
    """

    def __call__(self, options: dict[str, Any], report: LoadReport) -> EngineClient:
        """Build an engine from JSON-able ``options``."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is told on standard input."""

    endpoint: str
    """ZeroMQ address the server listens on."""
    token: str
    factory: str
    """``package.module:function``, an EngineFactory."""
    options: dict[str, Any] = {}


def resolve_factory(path: str) -> EngineFactory:
    """Import the function that ``package.module:function`` names. Raises OptionError."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise OptionError(f"engine factory {path!r} is not of the form 'package.module:function'")
    try:
        factory: EngineFactory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"engine factory {path!r} cannot be imported: {error}") from error
    return factory


class _Relay:
    """Carries one request's events to the server, as far as its credit reaches.

    Without credit it stops reading, the engine's own bounded stream fills up, and the engine holds the row.
    """

    def __init__(self, stream: int, events: EventStream, send: Callable[[Item], None]) -> None:
        self._stream = stream
        self._events = events
        self._send = send
        self._event_credit = WINDOW_EVENTS
        self._token_credit = WINDOW_TOKENS
        self._count = TokenCount()
        self._discard = False
        self._changed = asyncio.Event()

    def grant(self, num_events: int, num_tokens: int) -> None:
        self._event_credit += num_events
        self._token_credit += num_tokens
        self._changed.set()

    def cancel(self, reason: str) -> None:
        """Stop the request. What it still emits is dropped, so that its end needs no further credit."""
        self._discard = True
        self._changed.set()
        self._events.cancel(reason)

    def end_reasoning(self) -> None:
        """Close the answer's reasoning."""
        self._events.end_reasoning()

    async def run(self) -> Completed | Failed:
        """Carry every event; the last one."""
        async for event in self._events:
            if isinstance(event, Completed | Failed):
                self._send(item(self._stream, event))
                return event
            await self._spend(event)
            if not self._discard:
                self._send(item(self._stream, event))
        raise StreamProtocol("the engine ended a stream without Completed or Failed")

    async def _spend(self, event: Event) -> None:
        num_tokens = min(self._count.added_by(event), WINDOW_TOKENS)
        while not self._discard and (self._event_credit < 1 or self._token_credit < num_tokens):
            self._changed.clear()
            await self._changed.wait()
        self._event_credit -= 1
        self._token_credit -= num_tokens


class EngineProcess:
    """Serves one engine to one server. Lives on the event loop of the process's main thread."""

    def __init__(self, spec: EngineSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._engine: EngineClient | None = None
        self._engine_failed = False
        self._asking_state = False
        self._relays: dict[int, _Relay] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._outgoing: list[Item] = []
        socket = open_socket(context, zmq.DEALER)
        socket.connect(spec.endpoint)
        self._socket = FrameSocket(socket, self._receive)

    async def serve(self) -> None:
        """Load, then serve until the server says Close.

        Raises:
            DeviceError: the engine failed for good. Nobody can be served here any more; a new process may do better.
        """
        self._send(Hello(WIRE_VERSION, self._spec.token, os.getpid()))
        loading = self._loop.create_task(self._load())
        closing = self._loop.create_task(self._closing.wait())
        await asyncio.wait({loading, closing}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            # After a failure too: the server says Close once it has read the reason.
            while not closing.done():
                await asyncio.wait({closing}, timeout=BEAT_S)
                self._send(Alive())
            if loading.result():
                await self._stop()
        self._send(Closed())
        self._socket.close(linger_s=_FLUSH_S)
        if self._engine_failed:
            raise DeviceError("the engine failed, and its process ends with it")

    async def _load(self) -> bool:
        try:
            self._engine = await self._build()
            # What was loaded stays: looking through it for garbage would stop every answer for a tenth of a second.
            gc.collect()
            gc.freeze()
            self._send(Ready(self._engine.info))
        except TrothError as error:
            self._send(LoadFailed(type(error).__name__, str(error)))
        # The edge of a thread: whatever a factory raises, the server must hear of it.
        except Exception as error:
            _log.exception("building the engine failed")
            self._send(LoadFailed("DeviceError", f"{type(error).__name__}: {error}"))
        else:
            return True
        return False

    async def _build(self) -> EngineClient:
        built: asyncio.Future[EngineClient] = self._loop.create_future()

        def report(stage: str, done: int, total: int) -> None:
            self._loop.call_soon_threadsafe(self._send, Loading(stage, done, total))

        def build() -> None:
            try:
                engine = resolve_factory(self._spec.factory)(self._spec.options, report)
            except BaseException as error:
                self._loop.call_soon_threadsafe(built.set_exception, error)
            else:
                self._loop.call_soon_threadsafe(built.set_result, engine)

        # A daemon of our own, not a pool's worker: a pool is joined at exit, and loading cannot be interrupted.
        threading.Thread(target=build, name="troth-load", daemon=True).start()
        return await built

    async def _stop(self) -> None:
        assert self._engine is not None, "stopped only after it was built"
        await self._engine.aclose()
        for relay in self._relays.values():
            relay.cancel("engine_closed")
        if self._running:
            await asyncio.wait(self._running, timeout=_FLUSH_S)
        self._flush()

    def _receive(self, parts: list[bytes]) -> None:
        match decode_to_engine(parts[-1]):
            case Credit(grants):
                for stream, num_events, num_tokens in grants:
                    if relay := self._relays.get(stream):
                        relay.grant(num_events, num_tokens)
            case Submit(stream, request):
                self._submit(stream, request)
            case Cancel(stream, reason):
                if relay := self._relays.get(stream):
                    relay.cancel(reason)
            case EndReasoning(stream):
                if relay := self._relays.get(stream):
                    relay.end_reasoning()
            case Unpin(name):
                assert self._engine is not None, "the server unpins only after Ready"
                self._engine.unpin(name)
            case AskStatus(ask):
                self._start(self._answer(ask))
            case Close():
                self._closing.set()

    def _submit(self, stream: int, request: Request) -> None:
        assert self._engine is not None, "the server submits only after Ready"
        try:
            relay = _Relay(stream, self._engine.submit(request), self._send_item)
        # The edge of a request: an engine that raises instead of answering Failed fails this request alone.
        except Exception as error:
            self._fail(stream, error)
        else:
            self._relays[stream] = relay
            self._start(self._relay(stream, relay))

    async def _relay(self, stream: int, relay: _Relay) -> None:
        end: Completed | Failed | None = None
        try:
            end = await relay.run()
        # The edge of a request, as above.
        except Exception as error:
            self._fail(stream, error)
        finally:
            del self._relays[stream]
        if isinstance(end, Failed) and not self._asking_state:
            await self._leave_with_engine()

    async def _leave_with_engine(self) -> None:
        """End the process if the engine has failed for good, not just a request."""
        self._asking_state = True
        status = await self._status()
        self._asking_state = False
        if status is not None and status.state == "failed":
            self._engine_failed = True
            self._closing.set()

    def _fail(self, stream: int, error: Exception) -> None:
        if not isinstance(error, TrothError):
            _log.error("an engine raised instead of ending a stream with Failed", exc_info=error)
            error = StreamProtocol(f"the engine raised {type(error).__name__}: {error}")
        self._send_item(item(stream, failure_event(error)))

    async def _answer(self, ask: int) -> None:
        if (status := await self._status()) is not None:
            self._send(Status(ask, status))

    async def _status(self) -> EngineStatus | None:
        """The engine's status; None when it gives none in time, which the server notices by itself."""
        assert self._engine is not None, "asked only after Ready"
        try:
            return await self._engine.status()
        except TrothError as error:
            _log.warning("no status: %s", error)
            return None

    def _start(self, work: Coroutine[None, None, None]) -> None:
        started = self._loop.create_task(work)
        self._running.add(started)
        started.add_done_callback(self._running.discard)

    def _send_item(self, one: Item) -> None:
        # All relays that one engine step woke run in the same turn of the loop; the flush after it makes one frame.
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(one)

    def _flush(self) -> None:
        if self._outgoing:
            items, self._outgoing = self._outgoing, []
            self._send(Events(items))

    def _send(self, message: ToServer) -> None:
        self._socket.send(encode(message))


def watch_server(lifeline: int) -> None:
    """Exit at once when the server is gone: when ``lifeline``, a file descriptor, comes to its end."""
    if sys.platform == "linux":
        # Ends even a process whose threads all hang in native code.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        while os.read(lifeline, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="troth-lifeline", daemon=True).start()


def read_line(descriptor: int) -> bytes:
    """The first line of ``descriptor``, unbuffered so that nothing after it is lost."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise EOFError("standard input ended before the engine spec; start this module through isolate.py")
        line += byte
    return bytes(line)


def main() -> None:
    """Serve the engine that standard input describes."""
    # Ctrl-C and service managers reach every process of a server; the server decides what happens to its engines.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    stdin = sys.stdin.fileno()
    spec = msgspec.json.decode(read_line(stdin), type=EngineSpec)
    watch_server(stdin)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def serve() -> None:
        await EngineProcess(spec, context).serve()

    exit_code = 1
    try:
        asyncio.run(serve())
        exit_code = 0
    except BaseException:
        _log.exception("the engine process failed")
    finally:
        context.term()
        # A factory that is still loading cannot be stopped; the process ends without it.
        os._exit(exit_code)


if __name__ == "__main__":
    main()
