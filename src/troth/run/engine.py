"""The generation loop: plan, launch, commit, emit. One loop for any number of requests; a single caller is a batch of
one.

``EngineLoop`` has no thread and reads time from an injected clock, so tests drive it step by step; ``worker.py``
gives it a thread and an inbox. Next: ``schedule/scheduler.py`` (what to compute), ``runner.py`` (computing it),
``emit.py`` (text).

    add -> scheduler queue -> plan -> runner.launch -> [in flight] -> commit -> emitter -> stream
                                 ^                                      |
                                 `------- hold / finish / cancel <------'
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Final, Protocol

from troth.contracts.events import Completed, Event, Prefill, Queued
from troth.contracts.failures import failure_event
from troth.contracts.names import RequestId
from troth.contracts.plan import StepPlan
from troth.contracts.ports import Clock, EngineStatus, PendingStep, StepRunner
from troth.contracts.request import Request
from troth.contracts.speculation import SpeculationStats
from troth.errors import (
    Busy,
    Cancelled,
    CapabilityUnavailable,
    DeviceError,
    DeviceLost,
    RequestError,
    TrothError,
)
from troth.run.disk_port import DiskPort
from troth.run.drafting import Drafting
from troth.run.emit import Emission, Emitter
from troth.run.engine_totals import EngineTotals
from troth.run.live_request import LiveRequest, Sink
from troth.run.memory_guard import MemoryGuard
from troth.schedule.scheduler import RowOutcome, Scheduler
from troth.text.detokenize import TokenBytes

POLL_S: Final = 0.01
"""How long an engine with nothing else to do waits for a grammar or a disk before it looks at its inbox again."""

MAX_SETTLING_STEPS: Final = 16
"""Computed at the end for rows that only have to fill a block: one, and what is in flight before it."""


class Grammars(Protocol):
    """Compiles the grammars of requests; ``run/grammar.py`` has the real one."""

    def prepare(self, request: Request) -> Future[object]:
        """Start compiling; the future raises RequestError for a grammar that cannot be."""


class EngineLoop:
    """Owns the scheduler, the runner and every live request. Not thread-safe: one owner calls it.

    Args:
        scheduler: fresh.
        runner: computes plans.
        tokenizer: turns ids into text.
        clock: monotonic seconds.
        pipeline_depth: steps that may be launched before the oldest is committed, beyond one.
        consumer_idle_s: a held request whose consumer reads nothing for this long is cancelled.
        grammars: compiles them; None: requests with one are refused.
        disk: the prompt cache's disk tier; None: there is none.
        memory: keeps the process within its memory; None: nobody does.
        drafting: makes drafts for requests that want some; None: for none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        tokenizer: TokenBytes,
        *,
        clock: Clock,
        pipeline_depth: int = 0,
        consumer_idle_s: float = 30.0,
        grammars: Grammars | None = None,
        disk: DiskPort | None = None,
        memory: MemoryGuard | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._clock = clock
        self._depth = pipeline_depth
        self._idle_s = consumer_idle_s
        self._grammars = grammars
        self._disk = disk
        self._memory = memory
        self._drafting = drafting
        self._live: dict[RequestId, LiveRequest] = {}
        self._compiling: set[RequestId] = set()
        """Requests whose grammar may be under way."""
        self._restoring: set[RequestId] = set()
        """Requests that may wait for the disk tier."""
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._totals = EngineTotals()

    def emitter(self, request: Request, *, whole: bool = False) -> Emitter:
        """What ``add`` needs to turn a request's tokens into text. Safe in any thread, and tools take time to compile.

        Args:
            request: what is asked.
            whole: whether the answer is read only when it has ended.

        Raises:
            RequestError: the request says of its answer what cannot be.
        """
        return Emitter(request, self._tokenizer, whole=whole)

    def add(self, request: Request, sink: Sink, emitter: Emitter | None = None) -> None:
        """Take a request in, with its emitter if it was made already. A refusal is its only event: Failed."""
        try:
            if self._memory is not None:
                self._memory.require_room()
            if request.grammar is not None and self._grammars is None:
                raise CapabilityUnavailable("a grammar", "this engine has no compiler for it", param="grammar")
            emitter = emitter or Emitter(request, self._tokenizer)
            drafter = self._drafting.drafter(request) if self._drafting is not None else None
            self._scheduler.add(request)
        except (RequestError, Busy) as error:
            self._totals.note_end(type(error).__name__)
            # Progress precedes the refusal, so that a client learns how long its prompt was.
            sink.offer(Prefill(num_done=0, num_cached=0, num_total=len(request.prompt_ids)))
            sink.offer(failure_event(error))
            return
        live = LiveRequest(request, emitter, sink, added_at=self._clock())
        self._live[request.request_id] = live
        if request.grammar is not None and self._grammars is not None:
            live.compilation = self._grammars.prepare(request)
            self._compiling.add(request.request_id)
        if self._disk is not None and self._disk.begin(request):
            live.restoring = True
            self._restoring.add(request.request_id)
        if drafter is not None and self._drafting is not None:
            self._drafting.begin(request.request_id, drafter)
        if live.waits:
            self._scheduler.hold(request.request_id, True)
        position = self._scheduler.num_waiting - 1 - self._scheduler.num_free_rows
        if position >= 0:
            sink.offer(Queued(position=position))
        sink.offer(Prefill(num_done=0, num_cached=0, num_total=len(request.prompt_ids)))
        emission = emitter.begin()
        if emission.forced_ids:
            self._scheduler.force(request.request_id, emission.forced_ids)
            self._emit(live, emission)

    def cancel(self, request_id: RequestId, reason: str) -> None:
        """End a request for its consumer: aborted when it asked, an error when it was not listening."""
        live = self._live.get(request_id)
        if live is None:
            return
        self._scheduler.finish(request_id, num_emitted=live.emitter.num_emitted)
        if reason == "requested":
            self._emit(live, live.emitter.close())
        else:
            self._fail(live, Cancelled(reason))

    def end_reasoning(self, request_id: RequestId) -> None:
        """Close a request's reasoning now, or as it begins, where the context has room for the tokens of the mark."""
        live = self._live.get(request_id)
        if live is None or not live.has_room_to_close(self._scheduler.limits.largest_request):
            return
        emission = live.emitter.end_reasoning()
        if emission.forced_ids:
            self._scheduler.force(request_id, emission.forced_ids)
            self._emit(live, emission)

    def has_room(self, request_id: RequestId) -> None:
        """The consumer caught up: plan for the request again."""
        live = self._live.get(request_id)
        if live is not None and live.held:
            live.held = False
            self._scheduler.hold(request_id, live.waits)

    def unpin(self, name: str) -> None:
        """Let the prompt that a request pinned by this name go."""
        self._scheduler.unpin(name)

    def close(self, failure: TrothError | None = None) -> None:
        """End everything, with ``failure`` if there was one, and give the device memory back."""
        ended = list(self._live.values())
        # Consumers first: the bug that ends the loop may be in what gives the blocks back.
        for live in ended:
            self._fail(live, failure or Cancelled("engine_closed"))
        try:
            for live in ended:
                self._scheduler.finish(live.request.request_id, num_emitted=live.emitter.num_emitted)
            if self._disk is not None and failure is None:
                self._settle()
        finally:
            try:
                if self._disk is not None:
                    self._disk.close(keep=failure is None)
            finally:
                self._in_flight.clear()
                self._runner.close()

    def _settle(self) -> None:
        """Let rows whose answers are complete fill their last block and leave: only what they left is kept on disk."""
        for _ in range(MAX_SETTLING_STEPS):
            if not self._scheduler.states() or not self.step():
                return

    def step(self) -> bool:
        """Plan and launch one step, commit what is due; False when there was nothing to do."""
        compilations, restoring = self._take_compiled(), self._work_disk()
        if self._drafting is not None and self._in_flight and self._drafting.is_split:
            self._commit_oldest()
            return True
        if self._drafting is not None:
            self._drafting.propose(is_idle=not self._in_flight)
        starts = True
        plan = self._scheduler.plan(self._clock())
        if plan is not None:
            self._note_admissions(plan)
            # A step that this thread computes itself must not keep the tokens of earlier ones waiting.
            starts = self._runner.starts(plan)
            while self._in_flight and not starts:
                self._commit_oldest()
            self._launch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > self._depth or not starts):
            self._commit_oldest()
            return True
        if plan is None and restoring and self._disk is not None:
            self._disk.wait(compilations, POLL_S)
            return True
        if plan is None and compilations:
            wait(compilations, POLL_S, FIRST_COMPLETED)
            return True
        return plan is not None

    def follow_memory(self) -> None:
        """Look what the process holds, and make it less where it is too much. Called now and then by the owner."""
        if self._memory is not None:
            self._memory.follow()

    def cancel_idle_consumers(self) -> None:
        """End held requests whose consumers stopped reading. Called now and then by the owner."""
        now = self._clock()
        for live in [live for live in self._live.values() if live.held]:
            if now - live.sink.last_read > self._idle_s:
                self.cancel(live.request.request_id, "consumer_idle")

    def status(self, state: str, downgrades: tuple[str, ...]) -> EngineStatus:
        """A snapshot of counters and queues."""
        return self._totals.status(
            state, downgrades, self._scheduler, drafting=self._drafting, disk=self._disk, memory=self._memory
        )

    def _work_disk(self) -> bool:
        """Give the disk tier its turn, let requests run that wait for it no more; whether it has more to do."""
        if self._disk is None:
            return False
        more = self._disk.work()
        for request_id in [one for one in self._restoring if not self._disk.is_waiting(one)]:
            self._restoring.remove(request_id)
            live = self._live.get(request_id)
            if live is not None:
                live.restoring = False
                self._scheduler.hold(request_id, live.waits)
        return more

    def _take_compiled(self) -> list[Future[object]]:
        """Let requests run whose grammar is ready, refuse those whose grammar cannot be; what is still under way."""
        under_way: list[Future[object]] = []
        for request_id in list(self._compiling):
            live = self._live.get(request_id)
            if live is not None and live.compilation is not None and not live.compilation.done():
                under_way.append(live.compilation)
                continue
            self._compiling.remove(request_id)
            if live is None or live.compilation is None:
                continue
            error, live.compilation = live.compilation.exception(), None
            self._scheduler.hold(request_id, live.waits)
            if error is not None:
                self._scheduler.finish(request_id, num_emitted=0)
                self._fail(live, error if isinstance(error, TrothError) else DeviceError(f"no grammar: {error!r}"))
        return under_way

    def _launch(self, plan: StepPlan) -> None:
        self._totals.note_step()
        try:
            self._in_flight.append((plan, self._runner.launch(plan)))
        except DeviceError as error:
            # Earlier steps are older and may still be fine; this one is the newest under way.
            while self._in_flight:
                self._commit_oldest()
            self._fail_step(error)

    def _commit_oldest(self) -> None:
        plan, pending = self._in_flight.popleft()
        try:
            result = pending.result()
        except DeviceError as error:
            self._fail_step(error)
            return
        outcomes = self._scheduler.commit(result)
        if self._drafting is not None:
            self._drafting.note(plan, outcomes)
        self._apply(outcomes, None)

    def _fail_step(self, error: DeviceError) -> None:
        """End the rows of the oldest step under way. Raises DeviceLost when no other step can be computed either."""
        self._apply(self._scheduler.fail_step(str(error)), error)
        if isinstance(error, DeviceLost):
            raise error

    def _note_admissions(self, plan: StepPlan) -> None:
        now = self._clock()
        for admission in plan.admissions:
            live = self._live.get(admission.request.request_id)
            if live is not None and live.started_at is None:
                live.started_at = now
                live.num_cached = admission.num_cached_tokens
                self._totals.note_admission(live)

    def _apply(self, outcomes: list[RowOutcome], error: DeviceError | None) -> None:
        for outcome in outcomes:
            live = self._live.get(outcome.request_id)
            if live is None:
                continue
            if outcome.failure is not None:
                if error is None and self._disk is not None:
                    self._disk.withdraw(live.request)
                for name in self._scheduler.pins.discarded():
                    self._scheduler.unpin(name)
                self._fail(live, error or DeviceError(outcome.failure))
                continue
            if outcome.dead_end is not None:
                self._fail(live, RequestError(outcome.dead_end, param="grammar", code="grammar_dead_end"))
                continue
            live.emitter.take_prompt_logprobs(outcome.prompt_logprobs, outcome.num_prefilled)
            if live.first_token_at is None:
                self._note_prefill(live, outcome.num_prefilled)
            if outcome.token_ids or outcome.finish is not None:
                self._take_tokens(live, outcome)

    def _note_prefill(self, live: LiveRequest, num_prefilled: int) -> None:
        total = len(live.request.prompt_ids)
        done = min(num_prefilled, total)
        if done > live.num_prefilled:
            live.num_prefilled = done
            self._offer(live, Prefill(num_done=done, num_cached=live.num_cached, num_total=total))

    def _take_tokens(self, live: LiveRequest, outcome: RowOutcome) -> None:
        now = self._clock()
        if live.first_token_at is None:
            live.first_token_at = now
            if self._disk is not None and live.started_at is not None:
                self._disk.note_prefill(len(live.request.prompt_ids) - live.num_cached, now - live.started_at)
            if live.request.pin is not None and not self._pin(live, live.request.pin):
                return
        live.last_token_at = now
        num_known = live.emitter.num_emitted + len(outcome.token_ids)
        emission = live.emitter.push(outcome.token_ids, outcome.logprobs, outcome.finish)
        num_read = emission.num_emitted - len(emission.forced_ids)
        if emission.finish is not None and (outcome.finish is None or num_read < num_known):
            self._scheduler.finish(outcome.request_id, num_emitted=emission.num_emitted)
        elif emission.finish is None and emission.forced_ids:
            self._scheduler.force(outcome.request_id, emission.forced_ids, num_emitted=num_read)
        self._emit(live, emission)

    def _pin(self, live: LiveRequest, name: str) -> bool:
        """Keep the prompt, which is all committed now; the request fails if that cannot be."""
        try:
            self._scheduler.pin(name, live.request.namespace, live.request.prompt_ids)
        except RequestError as error:
            self._scheduler.finish(live.request.request_id, num_emitted=0)
            self._fail(live, error)
            return False
        return True

    def _emit(self, live: LiveRequest, emission: Emission) -> None:
        for event in emission.events:
            self._offer(live, event)
        if emission.finish is None:
            return
        speculation = self._end(live, emission.finish)
        live.sink.offer(
            Completed(
                finish_reason=emission.finish,
                usage=live.usage(),
                timings=live.timings(self._clock()),
                seed=live.request.sampling.seed,
                stop_match=live.emitter.stop_match,
                prompt_logprobs=live.emitter.prompt_logprobs,
                unclosed_reasoning=live.emitter.unclosed_reasoning,
                speculation=speculation,
            )
        )

    def _fail(self, live: LiveRequest, error: TrothError) -> None:
        self._end(live, type(error).__name__)
        live.sink.offer(failure_event(error))

    def _end(self, live: LiveRequest, end: str) -> SpeculationStats | None:
        """Forget a request; what became of its drafts."""
        del self._live[live.request.request_id]
        self._totals.note_end(end, live.emitter.num_emitted)
        if self._disk is not None:
            self._disk.forget(live.request.request_id)
        return None if self._drafting is None else self._drafting.end(live.request.request_id)

    def _offer(self, live: LiveRequest, event: Event) -> None:
        if not live.sink.offer(event) and not live.held:
            live.held = True
            self._scheduler.hold(live.request.request_id, True)
