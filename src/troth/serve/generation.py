"""Runs generations: hands requests to the engine, answers streamed or whole, and ends them when the client does.

Refuses to know how bodies look (``openai_chat.py``, ``openai_completions.py``). The status of a stream is decided by the engine's first
event that says anything; errors after it are records of the stream. Read next: ``sse.py``, ``errors.py``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from troth.contracts.events import Completed, Event, Failed, Prefill, Queued, Segment
from troth.contracts.ports import EventStream
from troth.errors import StreamProtocol, TrothError
from troth.serve.body import BodyReader, ClientGone
from troth.serve.errors import EngineFailure, HttpError, error_object, internal_error
from troth.serve.fields import Fields, decode_object
from troth.serve.limits import StreamLimit
from troth.serve.metrics import Metrics
from troth.serve.reply import DONE, Answer, Generation, encode
from troth.serve.sse import EventSink

_log = logging.getLogger(__name__)
_INLINE_BYTES: Final = 16 * 1024
"""Larger bodies are read and tokenised in a thread, so that running streams do not wait for them."""


class GenerationEndpoint:
    """An ASGI endpoint that generates.

    Args:
        read: makes a generation of a body's fields; pure, may run in a thread.
        bodies, limit, metrics: shared by all endpoints of the server.
        keepalive_s: longest silence of a stream.
        timeout_s: longest generation; None: no limit.
    """

    def __init__(
        self,
        read: Callable[[Fields], Generation],
        *,
        bodies: BodyReader,
        limit: StreamLimit,
        metrics: Metrics,
        keepalive_s: float,
        timeout_s: float | None,
    ) -> None:
        self._read = read
        self._bodies = bodies
        self._limit = limit
        self._metrics = metrics
        self._keepalive_s = keepalive_s
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors before the answer begins are raised."""
        try:
            body = await self._bodies.read(scope, receive)
            with self._limit.running():
                generation = await self._prepare(body)
                debug = Headers(scope=scope).get("x-troth-debug") == "1"
                run = _Run(generation, EventSink(scope, send), self._metrics, debug=debug)
                await self._supervise(run, receive, send)
        except ClientGone:
            return

    async def _prepare(self, body: bytes) -> Generation:
        if len(body) <= _INLINE_BYTES:
            return self._read(Fields(decode_object(body)))
        return await asyncio.to_thread(lambda: self._read(Fields(decode_object(body))))

    async def _supervise(self, run: _Run, receive: Receive, send: Send) -> None:
        try:
            body = await self._watched(run, receive)
        except ClientGone:
            raise
        except Exception as error:
            if not run.sink.begun:
                raise
            if not isinstance(error, TrothError):
                _log.exception("a stream failed")
                error = internal_error()
            await run.sink.end(b"data: %b\n\n" % encode(error_object(error)))
        else:
            if body is None:
                await run.sink.end(DONE)
            else:
                await Response(body, media_type="application/json")(run.sink.scope, receive, send)

    async def _watched(self, run: _Run, receive: Receive) -> bytes | None:
        """Run to the end, or to the client's, or to the time limit; then nothing of it is left in the engine."""
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout_s is None else loop.time() + self._timeout_s
        work = loop.create_task(run.answer())
        gone = loop.create_task(_client_gone(receive))
        reason = "disconnected"
        try:
            while True:
                wait_s = max(0.0, self._keepalive_s - run.sink.idle_s)
                if deadline is not None:
                    wait_s = min(wait_s, max(0.0, deadline - loop.time()))
                await asyncio.wait({work, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
                if gone.done():
                    raise ClientGone
                if deadline is not None and loop.time() >= deadline:
                    reason = "timeout"
                    raise HttpError(
                        504,
                        f"the answer took longer than {self._timeout_s:g} s, the limit of this server",
                        code="request_timeout",
                        retry=False,
                    )
                if run.sink.is_stalled:
                    reason = "consumer_idle"
                    run.sink.abort()
                    raise ClientGone
                if run.sink.idle_s >= self._keepalive_s:
                    await run.sink.keep_alive()
        finally:
            run.cancel(reason)
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


class _Run:
    """One generation under way."""

    def __init__(self, generation: Generation, sink: EventSink, metrics: Metrics, *, debug: bool) -> None:
        self.sink = sink
        self._generation = generation
        self._reply = generation.reply
        self._metrics = metrics
        self._debug = debug
        self._opening = asyncio.Lock()
        self._prefill_began: float | None = None
        client = generation.model.client
        self._streams: list[EventStream] = [client.submit(request) for request in generation.requests]

    def cancel(self, reason: str) -> None:
        """Stop what still runs in the engine."""
        for stream in self._streams:
            stream.cancel(reason)

    async def answer(self) -> bytes | None:
        """Generate. Returns the body of a whole reply, None after a stream."""
        generation = self._generation
        if not generation.wishes.stream:
            answers = await _all([self._collect(stream) for stream in self._streams])
            completed = [answer.completed for answer in answers]
            return self._reply.whole(answers, generation.usage(completed), self._extension(completed))
        completed = await _all([self._pump(choice, stream) for choice, stream in enumerate(self._streams)])
        if generation.wishes.include_usage:
            await self.sink.write(self._reply.usage(generation.usage(completed)))
        return None
