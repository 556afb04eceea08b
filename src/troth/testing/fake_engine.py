"""An engine without a model: scripted answers, one token per byte, with rows, a queue, steps and back-pressure.

Refuses to know what a good answer is. It keeps the whole contract of EngineClient, so whatever works with it works
with a real engine. Read next: ``contracts/ports.py``, ``fake_answer.py``.

    engine = FakeEngine("Hello there.")
    engine = FakeEngine(lambda request: FakeAnswer(text=request.stop[0], step_tokens=4), max_rows=1)
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from troth.contracts.events import Completed, Event, Failed, Queued, Usage
from troth.contracts.memory_plan import MemoryPlan
from troth.contracts.names import BLOCK_TOKENS
from troth.contracts.ports import EngineInfo, EngineStatus
from troth.contracts.prefix_cache import PinnedPrefix, PrefixCacheStatus
from troth.contracts.request import Request
from troth.errors import ContextExceeded, NotReady, RequestError, TrothError
from troth.runtime.event_queue import EventQueue, QueuedEvents
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.testing.fake_answer import FakeAnswer, Thinking, play

_MAX_QUEUED_EVENTS: Final = 32
_HELD_POLL_S: Final = 0.001


Script = Callable[[Request], FakeAnswer]


class FakeEngine:
    """An EngineClient that answers by script. Use it on one event loop.

    Args:
        answer: the text of every answer, or the answer, or what gives the answer to a request.
        model: the name it is served under.
        context_tokens: prompt and answer must fit in it.
        max_rows: requests answered side by side.
        max_waiting: requests waiting for a row before Busy.
        step_s: seconds from step to step.
        consumer_idle_s: a consumer that lets its queue stay full for this long is cancelled.
        ready: False: the engine is loading until ``become_ready`` or ``fail``.
    """

    def __init__(
        self,
        answer: str | FakeAnswer | Script = "Hello from a fake engine.",
        *,
        model: str = "fake",
        context_tokens: int = 8192,
        max_rows: int = 8,
        max_waiting: int = 64,
        step_s: float = 0.0,
        consumer_idle_s: float = 30.0,
        ready: bool = True,
    ) -> None:
        self.requests: list[Request] = []
        """Every request handed over, in order."""
        self.cancelled: list[tuple[str, str]] = []
        """(request id, reason) of every request its consumer cancelled."""
        self._answer = _script(answer)
        self._step_s = step_s
        self._consumer_idle_s = consumer_idle_s
        self._info = _info(model, context_tokens, max_rows, max_waiting)
        self._state = "ready" if ready else "loading"
        self._error: TrothError = NotReady(f"{model} is loading; try again in a moment")
        self._rows: list[_Row] = []
        self._waiting: deque[_Row] = deque()
        self._steps: asyncio.Task[None] | None = None
        self._num_steps = 0
        self._usage: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._pins: dict[str, PinnedPrefix] = {}

    @property
    def info(self) -> EngineInfo:
        """What the engine is. Raises NotReady while loading, and what ``fail`` was given."""
        if self._state != "ready":
            raise self._error
        return self._info

    def become_ready(self) -> None:
        """End the loading state."""
        self._state = "ready"

    def fail(self, error: TrothError) -> None:
        """Fail as a whole: running requests and all later ones end with ``error``."""
        self._state, self._error = "failed", error
        self._end_all(error)

    def submit(self, request: Request) -> QueuedEvents:
        """Hand a request over; refusals arrive as the stream's first event."""
        self.requests.append(request)
        thinking = Thinking()
        queue = EventQueue(
            request.request_id,
            on_cancel=lambda reason: self._cancel(row, reason),
            on_end_reasoning=thinking.end,
        )
        room_tokens = self._info.context_tokens - len(request.prompt_ids)
        row = _Row(request, queue, play(self._answer(request), request, room_tokens, thinking))
        if refusal := self._refusal(request):
            self._end(row, refusal)
            return queue.stream()
        if self._num_ahead >= 0:
            queue.put(Queued(position=self._num_ahead))
        self._waiting.append(row)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.get_running_loop().create_task(self._run())
        return queue.stream()

    async def status(self) -> EngineStatus:
        """What the engine is doing."""
        return EngineStatus(
            state=self._state,
            num_running=len(self._rows),
            num_waiting=len(self._waiting),
            num_steps=self._num_steps,
            blocks_used=(len(self._rows),),
            blocks_free=(self._info.max_rows - len(self._rows),),
            num_prompt_tokens=self._usage["prompt"],
            num_completion_tokens=self._usage["completion"],
            num_cached_tokens=self._usage["cached"],
            num_preemptions=0,
            num_requests_by_end=dict(self._ends),
            prefix_cache=PrefixCacheStatus(pins=tuple(self._pins.values())) if self._pins else None,
        )

    def unpin(self, name: str) -> None:
        """Forget a pin."""
        self._pins.pop(name, None)

    async def aclose(self) -> None:
        """End every request with Failed(Cancelled)."""
        self._state, self._error = "closed", NotReady(f"{self._info.model} is closed")
        self._end_all(Failed(kind="Cancelled", message="the request was cancelled: engine_closed"))
        if self._steps is not None:
            await asyncio.wait({self._steps})

    @property
    def _num_ahead(self) -> int:
        """Requests that would wait before one more; negative: rows that are free."""
        return len(self._rows) + len(self._waiting) - self._info.max_rows

    def _refusal(self, request: Request) -> Failed | None:
        if self._state != "ready":
            return _failed(self._error)
        if not request.prompt_ids:
            return _failed(RequestError("the prompt has no tokens; send at least one", param="prompt"))
        limit, num_prompt = self._info.context_tokens, len(request.prompt_ids)
        if num_prompt + (request.max_tokens or 1) > limit:
            return _failed(
                ContextExceeded(num_prompt_tokens=num_prompt, max_tokens=request.max_tokens or 1, limit=limit)
            )
        if self._num_ahead >= self._info.max_waiting:
            message = f"{self._num_ahead} requests are waiting already; try again in a moment"
            return Failed(kind="Busy", message=message, retry_after_s=1.0)
        return None

    async def _run(self) -> None:
        while self._rows or self._waiting:
            self._admit()
            advanced = [self._step(row) for row in list(self._rows)]
            self._num_steps += 1
            await asyncio.sleep(self._step_s if any(advanced) else max(self._step_s, _HELD_POLL_S))

    def _admit(self) -> None:
        num_free = self._info.max_rows - len(self._rows)
        for _ in range(min(num_free, len(self._waiting))):
            self._rows.append(self._waiting.popleft())
        if num_free:
            for position, row in enumerate(self._waiting):
                row.queue.put(Queued(position=position))

    def _step(self, row: _Row) -> bool:
        """Let a row emit what one step gives; False when its consumer does not keep up."""
        if row.queue.num_queued >= _MAX_QUEUED_EVENTS:
            row.held_since = row.held_since or time.monotonic()
            if time.monotonic() - row.held_since >= self._consumer_idle_s:
                self._end(row, Failed(kind="Cancelled", message="the request was cancelled: consumer_idle"))
            return False
        row.held_since = None
        for event in next(row.steps):
            if isinstance(event, Completed | Failed):
                self._end(row, event)
            else:
                row.num_emitted = getattr(event, "num_completion_tokens", row.num_emitted)
                row.queue.put(event)
        return True

    def _cancel(self, row: _Row, reason: str) -> None:
        self.cancelled.append((row.request.request_id, reason))
        usage = Usage(num_prompt_tokens=len(row.request.prompt_ids), num_completion_tokens=row.num_emitted)
        self._end(row, Completed(finish_reason="aborted", usage=usage, seed=row.request.sampling.seed))

    def _end(self, row: _Row, event: Completed | Failed) -> None:
        if row in self._rows:
            self._rows.remove(row)
        elif row in self._waiting:
            self._waiting.remove(row)
        event = self._pinned(row.request, event)
        if isinstance(event, Completed):
            self._usage["prompt"] += event.usage.num_prompt_tokens
            self._usage["completion"] += event.usage.num_completion_tokens
            self._usage["cached"] += event.usage.num_cached_tokens
        self._ends[event.finish_reason if isinstance(event, Completed) else event.kind] += 1
        row.queue.put(event)

    def _pinned(self, request: Request, event: Completed | Failed) -> Completed | Failed:
        """Keep the prompt of a request that is to be pinned, a byte for a token, as far as it has whole blocks."""
        if request.pin is None or not isinstance(event, Completed) or event.finish_reason == "aborted":
            return event
        num_tokens = len(request.prompt_ids) // BLOCK_TOKENS * BLOCK_TOKENS
        if not num_tokens:
            message = f"nothing of prefix {request.pin!r} can be kept: it has {len(request.prompt_ids)} tokens"
            return _failed(RequestError(message, param="pin", code="nothing_to_pin"))
        self._pins[request.pin] = PinnedPrefix(name=request.pin, num_tokens=num_tokens, num_bytes=num_tokens)
        return event

    def _end_all(self, error: TrothError | Failed) -> None:
        for row in [*self._rows, *self._waiting]:
            self._end(row, error if isinstance(error, Failed) else _failed(error))


@dataclass(slots=True, eq=False)
class _Row:
    request: Request
    queue: EventQueue
    steps: Iterator[list[Event]]
    num_emitted: int = 0
    held_since: float | None = None


def _script(answer: str | FakeAnswer | Script) -> Script:
    if callable(answer):
        return answer
    fixed = FakeAnswer(text=answer) if isinstance(answer, str) else answer
    return lambda request: fixed


def _failed(error: TrothError) -> Failed:
    return Failed(
        kind=type(error).__name__,
        message=str(error),
        param=getattr(error, "param", None),
        code=getattr(error, "code", None),
        retry_after_s=getattr(error, "retry_after_s", None),
    )


def _info(model: str, context_tokens: int, max_rows: int, max_waiting: int) -> EngineInfo:
    plan = MemoryPlan(
        device="none",
        dtype="uint8",
        weights_bytes=0,
        groups=(),
        state_bytes=0,
        transient_bytes=0,
        reserve_bytes=0,
        usable_bytes=0,
        context_tokens=context_tokens,
        declared_context_tokens=context_tokens,
        max_rows=max_rows,
        decisions=("scripted answers need no memory",),
    )
    return EngineInfo(
        model=model,
        family="fake",
        context_tokens=context_tokens,
        max_rows=max_rows,
        vocab_size=ByteTokenizer.vocab_size,
        max_waiting=max_waiting,
        device="none",
        dtype="uint8",
        kv_dtype="uint8",
        pipeline_depth=1,
        plan=plan,
        load_s=0.0,
    )


def build_fake_engine(options: dict[str, Any], report: Callable[[str, int, int], None]) -> FakeEngine:
    """An ``engine_process.EngineFactory``: a FakeEngine in a process of its own.

    ``options`` are the fields of FakeAnswer (plain ones) and the arguments of FakeEngine.
    """
    report("scripting", 1, 1)
    of_answer = {field.name for field in fields(FakeAnswer)} & options.keys()
    answer = FakeAnswer(**{name: options[name] for name in of_answer})
    return FakeEngine(answer, **{name: value for name, value in options.items() if name not in of_answer})
