"""Runs generations: hands requests to the engine, answers streamed or whole, and ends them when the client does.

Refuses to know how bodies look (``openai_chat.py``, ``openai_completions.py``). The status of a stream is decided by
the engine's first event that says anything; errors after it are records of the stream. Read next: ``sse.py``,
``errors.py``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from troth.contracts.events import Completed, Failed, Prefill, Queued, Segment
from troth.contracts.ports import EventStream
from troth.contracts.tools import ToolCall, ToolCallDelta, ToolError
from troth.errors import StreamProtocol, TrothError
from troth.serve.body import BodyReader, ClientGone
from troth.serve.errors import EngineFailure, HttpError, error_object, internal_error
from troth.serve.fields import Fields, decode_object
from troth.serve.grammar import require_compiled
from troth.serve.limits import StreamLimit
from troth.serve.metrics import Metrics
from troth.serve.reply import DONE, Answer, Generation, encode
from troth.serve.running import RunningRequests
from troth.serve.sse import EventSink

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
_INLINE_BYTES: Final = 16 * 1024
"""Larger bodies are read and tokenised in a thread, so that running streams do not wait for them."""


class GenerationEndpoint:
    """An ASGI endpoint that generates.

    Args:
        read: makes a generation of a body's fields; pure, may run in a thread.
        bodies, limit, metrics, running: shared by all endpoints of the server.
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
        running: RunningRequests,
        keepalive_s: float,
        timeout_s: float | None,
    ) -> None:
        self._read = read
        self._bodies = bodies
        self._limit = limit
        self._metrics = metrics
        self._running = running
        self._keepalive_s = keepalive_s
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Errors before the answer begins are raised."""
        try:
            body = await self._bodies.read(scope, receive)
            with self._limit.running():
                generation = await self._prepare(body)
                if Headers(scope=scope).get("x-troth-debug") != "1":
                    generation = replace(generation, ignored=())
                run = _Run(generation, EventSink(scope, send), self._metrics)
                names = (generation.reply.generation_id, scope["state"]["request_id"])
                with self._running.named(names, run.streams, generation.model):
                    await self._supervise(run, receive)
        except ClientGone:
            return

    async def _prepare(self, body: bytes) -> Generation:
        if len(body) <= _INLINE_BYTES:
            generation = self._read(Fields(decode_object(body)))
        else:
            generation = await asyncio.to_thread(lambda: self._read(Fields(decode_object(body))))
        if generation.wishes.grammar is None:
            return generation
        return await asyncio.to_thread(require_compiled, generation)

    async def _supervise(self, run: _Run, receive: Receive) -> None:
        try:
            await self._watched(run, receive)
        except ClientGone:
            raise
        except Exception as error:
            if not run.sink.begun:
                raise
            if not isinstance(error, TrothError):
                _log.exception("a stream failed")
                error = internal_error()
            await run.sink.fail(b"data: %b\n\n" % encode(error_object(error)))

    async def _watched(self, run: _Run, receive: Receive) -> None:
        """Run to the end, or to the client's, or to the time limit; then nothing of it is left in the engine."""
        loop = asyncio.get_running_loop()
        deadline = math.inf if self._timeout_s is None else loop.time() + self._timeout_s
        work = loop.create_task(run.answer())
        gone = loop.create_task(_client_gone(receive))
        reason = "disconnected"
        try:
            while True:
                wait_s = min(run.sink.silence_left_s(self._keepalive_s), max(0.0, deadline - loop.time()))
                await asyncio.wait({work, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
                if gone.done():
                    raise ClientGone
                if loop.time() >= deadline:
                    reason = "timeout"
                    raise _timed_out(self._timeout_s)
                if run.sink.is_stalled:
                    reason = "consumer_idle"
                    run.sink.abort()
                    raise ClientGone
                await run.break_silence(self._keepalive_s)
        finally:
            run.cancel(reason)
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


class _Run:
    """One generation under way."""

    def __init__(self, generation: Generation, sink: EventSink, metrics: Metrics) -> None:
        self.sink = sink
        self._generation = generation
        self._reply = generation.reply
        self._metrics = metrics
        self._is_admitted = False
        """Whether the engine has taken up the prompt."""
        self._open = False
        """Whether the opening records of all choices are out."""
        self._opening = asyncio.Lock()
        self._eta = _Eta()
        client = generation.model.client
        self.streams: list[EventStream] = [client.submit(request) for request in generation.requests]

    def cancel(self, reason: str) -> None:
        """Stop what still runs in the engine."""
        for stream in self.streams:
            stream.cancel(reason)

    async def break_silence(self, keepalive_s: float) -> None:
        """Send a keep-alive if one is due; a stream whose first chunk takes this long is begun for it."""
        if self._is_admitted and self.sink.is_silent(keepalive_s):
            await self._begin()
        await self.sink.keep_alive(keepalive_s)

    async def answer(self) -> None:
        """Generate and send the whole answer."""
        generation, sink = self._generation, self.sink
        if generation.wishes.stream:
            ends = await _all([self._pump(choice, stream) for choice, stream in enumerate(self.streams)])
            usage = self._reply.usage(generation.usage(ends)) if generation.wishes.include_usage else b""
            await sink.end(usage + DONE)
        else:
            answers = await _all([self._collect(stream) for stream in self.streams])
            ends = [answer.completed for answer in answers]
            errors = [(choice, error) for choice, answer in enumerate(answers) for error in answer.errors]
            await sink.whole(self._reply.whole(answers, generation.usage(ends), generation.extension(ends, errors)))

    async def _collect(self, stream: EventStream) -> Answer:
        segments: list[Segment] = []
        calls: list[ToolCall] = []
        errors: list[ToolError] = []
        async for event in stream:
            if isinstance(event, Segment):
                segments.append(event)
            elif isinstance(event, ToolCall):
                calls.append(event)
                errors += [event.error] if event.error else []
            elif isinstance(event, ToolError):
                errors.append(event)
            elif isinstance(event, Completed | Failed):
                return Answer(self._ended(event), segments, calls, errors)
        raise StreamProtocol("the engine's stream stopped without an end")

    async def _pump(self, choice: int, stream: EventStream) -> Completed:
        reply, sink = self._reply, self.sink
        errors: list[tuple[int, ToolError]] = []
        async for event in stream:
            if isinstance(event, Segment | ToolCallDelta):
                if not self._open:
                    await self._begin()
                if isinstance(event, Segment):
                    records = reply.segment(choice, event)
                else:
                    records = reply.call_delta(choice, event)
                if records:
                    await sink.write(records)
            elif isinstance(event, ToolCall | ToolError):
                error = event.error if isinstance(event, ToolCall) else event
                errors += [(choice, error)] if error else []
            elif isinstance(event, Completed | Failed):
                completed = self._ended(event)
                await self._begin()
                await sink.write(reply.closing(choice, completed, self._generation.extension([completed], errors)))
                return completed
            else:
                await self._progress(choice, event)
        raise StreamProtocol("the engine's stream stopped without an end")

    async def _begin(self) -> None:
        async with self._opening:
            if not self._open:
                await self.sink.begin(self._reply.opening())
                self._open = True

    async def _progress(self, choice: int, event: Queued | Prefill) -> None:
        if isinstance(event, Prefill):
            eta_s = self._eta.after(event) if choice == 0 else None
            if event.num_done == 0:
                # An engine may still refuse a prompt that does not fit, with a status of its own.
                self._is_admitted = True
                return
            counts = {"done": event.num_done, "cached": event.num_cached, "total": event.num_total}
            notice: dict[str, Any] = {"prefill": {**counts, "eta_s": eta_s}}
        else:
            notice = {"queued": {"position": event.position}}
        await self._begin()
        if self._generation.wishes.include_progress and choice == 0:
            await self.sink.write(self._reply.notice(notice))

    def _ended(self, event: Completed | Failed) -> Completed:
        if isinstance(event, Failed):
            raise EngineFailure(event)
        if event.finish_reason == "aborted":
            # Nobody here asked for it: an answer that was cut is an error, never a finish reason.
            raise EngineFailure(Failed(kind="Cancelled", message="the engine was told to stop this answer"))
        self._metrics.completed(self._generation.model.name, event)
        return event


class _Eta:
    """Seconds a prefill still needs, from its pace so far."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None

    def after(self, event: Prefill) -> float | None:
        now = time.monotonic()
        if self._began is None:
            self._began = (now, max(event.num_done, event.num_cached))
            return None
        began, first_done = self._began
        num_done = event.num_done - first_done
        if num_done <= 0:
            return None
        return round((now - began) / num_done * (event.num_total - event.num_done), 3)


async def _all(works: Sequence[Coroutine[None, None, _Result]]) -> list[_Result]:
    """Run side by side; the first error ends the others before it is raised."""
    if len(works) == 1:
        return [await works[0]]
    running = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*running)
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _timed_out(timeout_s: float | None) -> HttpError:
    return HttpError(
        504,
        f"the answer took longer than {timeout_s:g} s, the limit of this server",
        code="request_timeout",
        retry=False,
    )
