"""Continuous batching: which tokens of which requests the next step feeds.

``plan(now)`` and ``commit(result)`` are the whole loop; everything else adds, ends or holds a request. No clock, I/O,
tensor, randomness or thread: the same calls give the same plans (``replay.py`` proves it on recorded traces).

Fairness in one step: every running decode first, then prompt chunks. Beside decodes the prompts together get exactly
``chunk_tokens``, so a decode waits at most one chunk and a prompt advances by at least one chunk per step.

A second step may be planned before the first is committed (``plan.ON_DEVICE`` stands for the token still in flight).
Next: ``request_state.py`` for one request's numbers, ``run/engine.py`` for the loop that drives this.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from troth.contracts.events import FinishReason
from troth.contracts.names import BLOCK_TOKENS, NO_ROW, RequestId, Row
from troth.contracts.plan import (
    NO_SAMPLE,
    ON_DEVICE,
    Admission,
    BlockUpdate,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from troth.contracts.prefill import next_prefill_step
from troth.contracts.prefix_cache import NoPrefixCache, PrefixCache
from troth.contracts.request import Request
from troth.errors import Busy, RequestError
from troth.schedule.admission import SchedulerLimits, admit, blocks_at_admission
from troth.schedule.block_pool import BlockPool
from troth.schedule.block_table import BlockTable
from troth.schedule.request_state import RequestState, Status, by_priority_then_arrival

# Compared thousands of times per step, where a member lookup on the enum class is several times a global.
WAITING: Final = Status.WAITING
RUNNING: Final = Status.RUNNING
SETTLING: Final = Status.SETTLING
ENDED: Final = Status.ENDED

Order = Callable[[RequestState], tuple[int, ...]]


@dataclass(slots=True)
class RowOutcome:
    """What a committed step means for one request."""

    request_id: RequestId
    token_ids: Sequence[int] = ()
    """Newly emitted tokens, in order."""
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    num_prefilled: int = 0
    """Tokens whose state is computed; progress of a request that has not emitted yet."""
    finish: FinishReason | None = None
    failure: str | None = None


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    states: list[RequestState]
    epochs: list[int]


class Scheduler:
    """State machine over requests, rows and blocks. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        pools: tuple[BlockPool, ...] | None = None,
        prefix_cache: PrefixCache | None = None,
        order: Order = by_priority_then_arrival,
    ) -> None:
        self.limits = limits
        self.pools = pools or tuple(BlockPool(count) for count in limits.num_blocks)
        self.num_preemptions = 0
        self._prefix_cache = prefix_cache or NoPrefixCache()
        self._order = order
        self._states: dict[RequestId, RequestState] = {}
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._free_rows = [Row(i) for i in range(limits.max_rows - 1, -1, -1)]
        self._releases: list[Row] = []
        self._in_flight: deque[_InFlight] = deque()
        self._planned: list[RequestState] = []
        self._num_arrivals = 0
        self._num_steps = 0

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def num_free_rows(self) -> int:
        """Rows nobody has."""
        return len(self._free_rows)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left and no step is under way."""
        return not self._states and not self._running and not self._in_flight

    def state_of(self, request_id: RequestId) -> RequestState | None:
        """The bookkeeping of a request that has not ended; read only."""
        return self._states.get(request_id)

    def states(self) -> list[RequestState]:
        """Every request with bookkeeping, settling ones included; read only."""
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> int:
        """Queue a request; return the most tokens it may emit.

        Raises:
            RequestError: it can never be served (ContextExceeded when it does not fit), or its id is taken.
            Busy: the queue is full.
        """
        if request.request_id in self._states:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        max_tokens = admit(request, self.limits)
        # Free rows are not queue places: a request that starts in the next step does not wait.
        if len(self._waiting) >= self.limits.max_waiting + len(self._free_rows):
            raise Busy(f"{len(self._waiting)} requests are waiting; the queue holds {self.limits.max_waiting}")
        state = RequestState(request, self._num_arrivals, max_tokens)
        self._num_arrivals += 1
        self._states[request.request_id] = state
        insort(self._waiting, state, key=self._order)
        return max_tokens

    def finish(self, request_id: RequestId, *, num_emitted: int | None = None) -> bool:
        """End a request for its consumer (stop string, refusal, cancellation); False when it had ended already.

        ``num_emitted`` cuts the output there: later tokens were never handed over.
        """
        state = self._states.get(request_id)
        if state is None:
            return False
        if num_emitted is not None:
            del state.token_ids[state.num_prompt + num_emitted :]
        self._end(state, publish=True)
        return True

    def hold(self, request_id: RequestId, held: bool) -> None:
        """Stop or resume planning for a request whose consumer does not keep up. It keeps its row and blocks."""
        state = self._states.get(request_id)
        if state is not None:
            state.held = held

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step, or None when no request can advance before a commit, an arrival or a release.

        ``now`` is recorded in traces; ordering depends on priority and arrival only.
        """
        del now
        plan = StepPlan(step_id=self._num_steps)
        self._planned = []
        preempted = self._plan_decodes(plan)
        self._plan_prefills(plan, admit_waiting=not preempted)
        if not plan.rows:
            return None
        plan.releases, self._releases = self._releases, []
        self._num_steps += 1
        self._in_flight.append(_InFlight(plan, self._planned, [state.epoch for state in self._planned]))
        return plan

    def commit(self, result: StepResult) -> list[RowOutcome]:
        """Take in the oldest step under way; what it means for each request that is still alive."""
        flight = self._in_flight.popleft()
        plan = flight.plan
        assert result.step_id == plan.step_id, f"step {result.step_id} committed, step {plan.step_id} is oldest"
        outcomes: list[RowOutcome] = []
        sample_steps = plan.sample_steps
        for i, state in enumerate(flight.states):
            if state.status is ENDED:
                continue
            if i in result.failures:
                self._end(state, publish=False)
                outcomes.append(RowOutcome(state.request_id, failure=result.failures[i]))
                continue
            samples = sample_steps[i] != NO_SAMPLE
            if state.epoch == flight.epochs[i]:
                state.num_done = plan.starts[i] + plan.num_new[i]
            elif not samples:
                continue  # the row lost its state meanwhile; a sampled token is still good, a chunk is not
            if state.status is SETTLING:
                self._release(state, publish=True)
                continue
            outcome = RowOutcome(state.request_id, num_prefilled=state.num_done)
            if samples:
                self._take_tokens(state, result.token_ids[i], outcome)
            if i in result.logprobs:
                outcome.logprobs = result.logprobs[i][: len(outcome.token_ids)]
            if i in result.prompt_logprobs:
                outcome.prompt_logprobs = result.prompt_logprobs[i]
            outcomes.append(outcome)
        return outcomes

    def fail_step(self, message: str) -> list[RowOutcome]:
        """The oldest step under way failed as a whole: every row in it ends, nothing of them is published."""
        flight = self._in_flight.popleft()
        outcomes = []
        for state in flight.states:
            if state.status is ENDED:
                continue
            settling = state.status is SETTLING
            self._end(state, publish=False)
            if not settling:
                outcomes.append(RowOutcome(state.request_id, failure=message))
        return outcomes

    def _plan_decodes(self, plan: StepPlan) -> bool:
        """Feed one output token of every row whose gap is one; whether a row was preempted to make room."""
        before = self.num_preemptions
        running = self._running
        i = 0
        while i < len(running):
            state = running[i]
            i += 1
            position = state.num_computed
            num_known = len(state.token_ids)
            if num_known + state.num_pending - position != 1 or position < state.num_prompt:
                continue
            if not self._wants_decode(state):
                continue
            if position % BLOCK_TOKENS == 0 and not self._make_room(state, position + 1, plan):
                continue
            self._append(plan, state, 1)
            plan.token_ids.append(state.token_ids[position] if position < num_known else ON_DEVICE)
        plan.num_decodes = len(plan.rows)
        return self.num_preemptions != before

    def _wants_decode(self, state: RequestState) -> bool:
        if state.status is RUNNING:
            # The last token of a full answer may still be in flight: feeding it would serve nobody.
            return not state.held and state.num_output < state.max_tokens
        return True

    def _plan_prefills(self, plan: StepPlan, *, admit_waiting: bool) -> None:
        """Feed prompt chunks of running rows, then of waiting requests, within this step's budget."""
        limits = self.limits
        prefilling = [s for s in self._running if (s.gap > 1 or s.num_computed < s.num_prompt) and not s.held]
        budget = limits.chunk_tokens if plan.num_decodes else limits.step_tokens
        alone = not plan.num_decodes and len(prefilling) + (len(self._waiting) if admit_waiting else 0) == 1
        widest = limits.step_tokens if alone else limits.chunk_tokens
        for state in prefilling:
            if budget <= 0:
                return
            if state.status is RUNNING:
                budget -= self._plan_chunk(plan, state, min(budget, widest))
        while admit_waiting and budget > 0 and self._free_rows:
            first = next((s for s in self._waiting if not s.num_pending and not s.held), None)
            if first is None or not self._admit(first, plan):
                return
            budget -= self._plan_chunk(plan, first, min(budget, widest))

    def _plan_chunk(self, plan: StepPlan, state: RequestState, width: int) -> int:
        """Feed the row's next chunk of at most ``width`` tokens; how many it got."""
        step = next_prefill_step(len(state.token_ids), state.num_computed, width)
        if not self._make_room(state, step.end, plan):
            return 0
        self._append(plan, state, step.end - step.start)
        plan.token_ids.extend(state.token_ids[step.start : step.end])
        return step.end - step.start

    def _append(self, plan: StepPlan, state: RequestState, num_new: int) -> None:
        """Put a row's share into the plan, all but its token ids, and count it as computed."""
        plan.rows.append(state.row)
        plan.request_ids.append(state.request_id)
        plan.starts.append(state.num_computed)
        plan.num_new.append(num_new)
        plan.num_draft.append(0)
        num_computed = state.num_computed = state.num_computed + num_new
        state.last_step = plan.step_id
        num_output = len(state.token_ids) - state.num_prompt + state.num_pending
        if num_computed == state.num_prompt + num_output and num_output < state.max_tokens and state.status is RUNNING:
            plan.sample_steps.append(num_output)
            state.num_pending += 1
        else:
            plan.sample_steps.append(NO_SAMPLE)
        self._planned.append(state)

    def _admit(self, state: RequestState, plan: StepPlan) -> bool:
        """Give a waiting request a row and the promise of its prompt's blocks; False when it must wait."""
        needed = blocks_at_admission(self.limits.groups, len(state.token_ids), self.limits.step_tokens)
        # Every running row may need a block soon; admitting into their last blocks would preempt someone at once.
        spare = len(self._running)
        for group, count in enumerate(needed):
            lacking = count + spare - self._unpromised(group)
            if lacking > 0 and self._prefix_cache.reclaim(group, lacking) < lacking:
                return False
        hit = self._prefix_cache.lookup(state.request, state.token_ids)
        self._waiting.remove(state)
        state.status = RUNNING
        state.row = self._free_rows.pop()
        state.tables = [BlockTable(s, p) for s, p in zip(self.limits.groups, self.pools, strict=True)]
        for group, table in enumerate(state.tables):
            if hit.num_tokens:
                table.adopt(hit.block_ids[group])
                plan.block_updates.append(BlockUpdate(state.row, group, 0, list(table.block_ids)))
        state.num_computed = state.num_done = hit.num_tokens
        if state.epoch == 0:
            state.num_cached = hit.num_tokens
        insort(self._running, state, key=self._order)
        plan.admissions.append(Admission(state.row, state.request, state.output_ids, hit.num_tokens))
        return True

    def _unpromised(self, group: int) -> int:
        """Free blocks of a group that no running prompt still counts on."""
        promised = 0
        for state in self._running:
            if state.gap > 1:
                spec = self.limits.groups[group]
                whole = spec.blocks_for(len(state.token_ids), self.limits.step_tokens)
                promised += max(0, whole - state.tables[group].num_live)
        return self.pools[group].num_free - promised

    def _make_room(self, state: RequestState, num_tokens: int, plan: StepPlan) -> bool:
        """Give the row slots for its first ``num_tokens`` tokens, preempting younger rows; False when it must wait.

        Rows already in this plan are not preempted: their turn this step is promised. The oldest row always gets room,
        so some request always advances.
        """
        while not self._grow(state, num_tokens, plan):
            victim = self._running[-1]
            if victim.last_step == plan.step_id:
                return False
            self._preempt(victim)
            if victim is state:
                return False
        return True

    def _grow(self, state: RequestState, num_tokens: int, plan: StepPlan) -> bool:
        """Give the row slots for its first ``num_tokens`` tokens in every group; all or nothing."""
        for group, table in enumerate(state.tables):
            # Steps run in order, so a step under way has read a dropped block before a later one writes to it.
            table.drop_before(state.num_computed)
            lacking = table.missing(num_tokens) - self.pools[group].num_free
            if lacking > 0 and self._prefix_cache.reclaim(group, lacking) < lacking:
                return False
        for group, table in enumerate(state.tables):
            first = len(table.block_ids)
            new_ids = table.grow(num_tokens)
            assert new_ids is not None, "the pool was checked above"
            if new_ids:
                plan.block_updates.append(BlockUpdate(state.row, group, first, new_ids))
        return True

    def _preempt(self, state: RequestState) -> None:
        """Take a row's blocks; it will be computed again from its tokens and continue exactly where it was."""
        if state.status is SETTLING:
            self._release(state, publish=True)
            return
        self.num_preemptions += 1
        self._publish(state)
        self._leave_row(state)
        state.status = WAITING
        state.num_computed = state.num_done = 0
        state.epoch += 1
        insort(self._waiting, state, key=self._order)

    def _take_tokens(self, state: RequestState, token_ids: list[int], outcome: RowOutcome) -> None:
        """Append sampled tokens up to the one that ends the request."""
        state.num_pending -= 1
        eos_ids = state.request.eos_ids
        left = state.max_tokens - (len(state.token_ids) - state.num_prompt)
        emitted = token_ids if len(token_ids) <= left else token_ids[:left]
        if len(emitted) == left:
            outcome.finish = "length"
        for count, token_id in enumerate(emitted, start=1):
            if token_id in eos_ids:
                emitted = emitted[:count]
                outcome.finish = "stop"
                break
        state.token_ids.extend(emitted)
        outcome.token_ids = emitted
        if outcome.finish is None:
            return
        if outcome.finish == "length" and self._worth_settling(state):
            del self._states[state.request_id]
            state.status = SETTLING
        else:
            self._end(state, publish=True)

    def _worth_settling(self, state: RequestState) -> bool:
        """Whether feeding the last token would complete a block that the prompt cache would keep."""
        return (
            self._prefix_cache.publishes
            and state.request.prompt_cache
            and state.status is RUNNING
            and len(state.token_ids) % BLOCK_TOKENS == 0
        )

    def _end(self, state: RequestState, *, publish: bool) -> None:
        self._states.pop(state.request_id, None)
        if state.status is WAITING:
            self._waiting.remove(state)
            state.status = ENDED
        else:
            self._release(state, publish=publish)

    def _release(self, state: RequestState, *, publish: bool) -> None:
        if publish:
            self._publish(state)
        self._leave_row(state)
        state.status = ENDED

    def _publish(self, state: RequestState) -> None:
        if self._prefix_cache.publishes and state.request.prompt_cache:
            tables = [table.block_ids for table in state.tables]
            self._prefix_cache.publish(state.request, state.committed_ids, tables)

    def _leave_row(self, state: RequestState) -> None:
        for table in state.tables:
            table.clear()
        self._running.remove(state)
        self._free_rows.append(state.row)
        self._releases.append(state.row)
        state.row = NO_ROW
