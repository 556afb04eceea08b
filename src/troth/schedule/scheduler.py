"""Continuous batching: which tokens of which requests the next step feeds.

``plan(now)`` and ``commit(result)`` are the whole loop; everything else adds, ends or holds a request. No clock, I/O,
tensor, randomness or thread: the same calls give the same plans (``replay.py`` proves it on recorded traces).

Fairness in one step: every running decode first, then prompt chunks. Beside decodes the prompts together get exactly
``chunk_tokens``, so a decode waits at most one chunk and a prompt advances by at least one chunk per step. A held
request, whose consumer does not read, keeps its row and blocks only as long as nobody waits for them.

A second step may be planned before the first is committed (``plan.ON_DEVICE`` stands for the token still in flight).
A row that is given drafts waits for its own commits instead: drafts follow a token that is known. They count as
computed once the commit says that they were right; the slots of the others are written again.
What a commit confirms is offered to the prompt cache at once, so that requests still running share it too.
Next: ``step_planning.py`` for what one step feeds, ``request_queues.py`` for who waits and who has a row,
``request_state.py`` for one request's numbers, ``prefix_index.py`` for what stays when they end, ``run/engine.py`` for
the loop that drives this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from troth.contracts.counted import counted
from troth.contracts.events import FinishReason
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.plan import NO_SAMPLE, StepPlan, StepResult, TokenLogprobs
from troth.contracts.request import Request
from troth.errors import Busy, RequestError
from troth.schedule.admission import SchedulerLimits, admit
from troth.schedule.block_pool import BlockPool
from troth.schedule.block_supply import BlockSupply
from troth.schedule.pins import Pins
from troth.schedule.prefix_index import PrefixIndex
from troth.schedule.request_queues import ENDED, RUNNING, SETTLING, Order, RequestQueues
from troth.schedule.request_state import RequestState, by_priority_then_arrival
from troth.schedule.reservations import Reservation, Reservations
from troth.schedule.step_planning import StepPlanning


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
    dead_end: str | None = None
    """Why the request's grammar lets no token follow."""
    num_drafted: int = 0
    """Drafts that the step verified."""
    num_accepted: int = 0
    """How many of ``token_ids`` were drafts."""


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
        order: Order = by_priority_then_arrival,
    ) -> None:
        self.limits = limits
        self._supply = BlockSupply(limits)
        self._reservations = Reservations(self._supply)
        self.pins = Pins(self._supply.index, limits)
        """Prefixes kept by name; changed by ``pin`` and ``unpin`` alone, which traces record."""
        self._starts_steps = RequestQueues(self._supply, limits.max_rows, order)
        self._planning = StepPlanning(limits, self._starts_steps, self._supply)
        self._states: dict[RequestId, RequestState] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._ending: list[tuple[RequestState, FinishReason]] = []
        """Rows whose last commit ended them with several tokens, until the next plan: their consumer may cut those."""
        self._num_arrivals = 0
        self._num_steps = 0

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The blocks of each cache group; read only."""
        return self._supply.pools

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """The prompt cache, if there is one; read only, but for pins."""
        return self._supply.index

    @property
    def num_preemptions(self) -> int:
        """Rows that lost their blocks to others since the start."""
        return self._starts_steps.num_preemptions

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._starts_steps.waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row, ended ones that settle aside."""
        return sum(1 for state in self._starts_steps.running if state.status is RUNNING)

    @property
    def num_free_rows(self) -> int:
        """Rows nobody has."""
        return self._starts_steps.num_free

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left and no step is under way."""
        return not (self._states or self._starts_steps.running or self._in_flight or self._reservations)

    def state_of(self, request_id: RequestId) -> RequestState | None:
        """The bookkeeping of a request that has not ended; read only."""
        return self._states.get(request_id)

    def states(self) -> list[RequestState]:
        """Every request with bookkeeping, settling ones included; read only."""
        return [*self._starts_steps.running, *self._starts_steps.waiting]

    def reservations(self) -> list[Reservation]:
        """Blocks on their way into the prompt cache from elsewhere; read only."""
        return self._reservations.all()

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
        if len(self._starts_steps.waiting) >= self.limits.max_waiting + self._starts_steps.num_free:
            waiting = counted(len(self._starts_steps.waiting), "request is", "requests are")
            raise Busy(f"{waiting} waiting; the queue holds {self.limits.max_waiting}")
        state = RequestState(request, self._num_arrivals, max_tokens)
        self._num_arrivals += 1
        self._states[request.request_id] = state
        self._starts_steps.enqueue(state)
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
            # The token at which a consumer ends is never committed, even where it was a draft that was fed already.
            last = len(state.token_ids) - 1 if num_emitted else len(state.token_ids)
            state.num_done = min(state.num_done, last)
        self._end(state, failed=False)
        return True

    def force(self, request_id: RequestId, token_ids: Sequence[int], *, num_emitted: int | None = None) -> None:
        """Append tokens that nobody sampled, on top of the request's limit: the next steps feed them, then go on.

        Samples still under way were drawn without them and are dropped. Admission kept room for them. ``num_emitted``
        cuts the output before them: what a commit brought behind it was drawn without them, too.
        """
        state = self._states[request_id]
        if num_emitted is not None:
            del state.token_ids[state.num_prompt + num_emitted :]
            num_known = min(state.num_computed, len(state.token_ids))
            state.num_recalled = max(0, state.num_recalled - (state.num_computed - num_known))
            state.num_computed = num_known
            state.num_done = min(state.num_done, num_known)
        self._ending = [(one, reason) for one, reason in self._ending if one is not state]
        if state.num_pending > 1:
            self._starts_steps.preempt(state)  # the second sample's step was fed the first one, which never was
        state.num_dropped += state.num_pending
        state.num_pending = 0
        state.token_ids.extend(token_ids)
        state.max_tokens += len(token_ids)

    def hold(self, request_id: RequestId, held: bool) -> None:
        """Stop or resume planning for a request whose consumer does not keep up.

        It keeps its row and blocks until others need them; then it waits, and is computed again when it goes on.
        """
        state = self._states.get(request_id)
        if state is not None:
            state.held = held

    def draft(self, request_id: RequestId, token_ids: Sequence[int] | None) -> None:
        """Propose what follows a request's last token; the next plan verifies as much of it as has room.

        From now on the row waits for its own commits, so that all its tokens are known when drafts are made; None ends
        that, but not while drafts are verified. Drafts come without claims: too many, or for a row that can take none,
        they are left out.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        if token_ids is None:
            assert not self._verifies(state), f"{request_id}: how many of its drafts are right is not known yet"
            self._planning.drafting.pop(state, None)
        else:
            self._planning.drafting[state] = token_ids

    def reserve(self, namespace: str, token_ids: Sequence[int]) -> Reservation | None:
        """As Reservations.reserve, leaving running rows what they count on. Filling it takes no step."""
        return self._reservations.reserve(namespace, token_ids, self._starts_steps.running)

    def adopt(self, reservation_id: int) -> None:
        """As Reservations.adopt: the next plans may serve its blocks."""
        self._reservations.adopt(reservation_id)

    def abandon(self, reservation_id: int) -> None:
        """As Reservations.abandon."""
        self._reservations.abandon(reservation_id)

    def pin(self, name: str, namespace: str, token_ids: Sequence[int]) -> int:
        """As Pins.pin."""
        return self.pins.pin(name, namespace, token_ids)

    def unpin(self, name: str) -> bool:
        """As Pins.unpin."""
        return self.pins.unpin(name)

    def shed(self, num_blocks: Sequence[int]) -> list[int]:
        """Have the prompt cache forget so many blocks of each group, the least wanted first; how many it did."""
        index = self._supply.index
        return [
            0 if index is None or not count else index.reclaim(group, count) for group, count in enumerate(num_blocks)
        ]

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step, or None when no request can advance before a commit, an arrival or a release.

        ``now`` is recorded in traces; ordering depends on priority and arrival only.
        """
        del now
        plan = StepPlan(step_id=self._num_steps)
        if self._ending:
            self._end_all()
        states = self._planning.fill(plan, is_idle=not self._in_flight)
        if not plan.rows:
            return None
        self._starts_steps.hand_over(plan)
        self._num_steps += 1
        self._in_flight.append(_InFlight(plan, states, [state.epoch for state in states]))
        return plan

    def commit(self, result: StepResult) -> list[RowOutcome]:
        """Take in the oldest step under way; what it means for each request that is still alive."""
        flight = self._in_flight.popleft()
        plan = flight.plan
        assert result.step_id == plan.step_id, f"step {result.step_id} committed, step {plan.step_id} is oldest"
        outcomes: list[RowOutcome] = []
        sample_steps, num_verifies = plan.sample_steps, plan.num_verifies
        for i, state in enumerate(flight.states):
            if state.status is ENDED:
                continue
            if i in result.failures:
                self._end(state, failed=True)
                outcomes.append(RowOutcome(state.request_id, failure=result.failures[i]))
                continue
            if i in result.dead_ends and not state.num_dropped:
                self._end(state, failed=False)
                outcomes.append(RowOutcome(state.request_id, dead_end=result.dead_ends[i]))
                continue
            samples = sample_steps[i] != NO_SAMPLE
            num_drafts = plan.num_draft[i] if num_verifies else 0
            if state.epoch == flight.epochs[i]:
                num_done = state.num_done = plan.starts[i] + plan.num_new[i] - num_drafts
                if num_done >= state.publish_at:
                    self._starts_steps.publish(state)
            elif not samples:
                continue  # the row lost its state meanwhile; a sampled token is still good, a chunk is not
            if state.status is SETTLING:
                self._starts_steps.release(state)
                continue
            outcome = RowOutcome(state.request_id, num_prefilled=state.num_done)
            if samples and state.num_dropped:
                state.num_dropped -= 1
                continue
            if samples:
                self._take_tokens(state, result.token_ids[i], outcome, completes=i in result.ends)
            if num_drafts:
                outcome.num_drafted = num_drafts
                outcome.num_accepted = max(0, min(len(result.token_ids[i]) - 1, len(outcome.token_ids)))
                if state.epoch == flight.epochs[i]:
                    # The last token is counted as not fed even where it was a draft: an end is never committed.
                    num_fed = max(0, len(outcome.token_ids) - 1)
                    state.num_computed += num_fed
                    state.num_done += num_fed
                    if self.limits.num_checkpoints is not None:
                        state.num_recalled = num_fed
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
            self._end(state, failed=True)
            if not settling:
                outcomes.append(RowOutcome(state.request_id, failure=message))
        return outcomes

    def _take_tokens(self, state: RequestState, token_ids: list[int], outcome: RowOutcome, *, completes: bool) -> None:
        """Append sampled tokens up to the one that ends the request; ``completes``: its grammar ends with them."""
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
        if completes and len(emitted) == len(token_ids):
            outcome.finish = "stop"
        state.token_ids.extend(emitted)
        outcome.token_ids = emitted
        if outcome.finish is None:
            return
        if len(emitted) > 1:
            self._ending.append((state, outcome.finish))
        else:
            self._finish(state, outcome.finish)

    def _verifies(self, state: RequestState) -> bool:
        """Whether a step under way was fed drafts of a request."""
        return any(
            one is state and num_drafts
            for flight in self._in_flight
            for one, num_drafts in zip(flight.states, flight.plan.num_draft, strict=True)
        )

    def _end_all(self) -> None:
        """End the rows whose consumers had the chance to cut what the last commits brought."""
        ending, self._ending = self._ending, []
        for state, finish in ending:
            if state.status is not ENDED:
                self._finish(state, finish)

    def _finish(self, state: RequestState, finish: FinishReason) -> None:
        if finish == "length" and self._worth_settling(state):
            del self._states[state.request_id]
            self._planning.drafting.pop(state, None)
            state.status = SETTLING
        else:
            self._end(state, failed=False)

    def _worth_settling(self, state: RequestState) -> bool:
        """Whether feeding the last token would complete a block that the prompt cache would keep."""
        return (
            state.prefix is not None
            and state.prefix.is_open
            and state.status is RUNNING
            and len(state.token_ids) % BLOCK_TOKENS == 0
        )

    def _end(self, state: RequestState, *, failed: bool) -> None:
        self._states.pop(state.request_id, None)
        self._planning.drafting.pop(state, None)
        self._starts_steps.end(state, failed=failed)
