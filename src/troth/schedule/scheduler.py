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
Next: ``request_state.py`` for one request's numbers, ``prefix_index.py`` for what stays when they end,
``run/engine.py`` for the loop that drives this.
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
    CheckpointCopy,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from troth.contracts.prefill import next_prefill_step
from troth.contracts.request import Request
from troth.errors import Busy, RequestError
from troth.schedule.admission import SchedulerLimits, admit
from troth.schedule.block_pool import BlockPool
from troth.schedule.block_supply import BlockSupply
from troth.schedule.pins import Pins
from troth.schedule.prefix_index import PrefixIndex
from troth.schedule.request_state import NEVER, RequestState, Status, by_priority_then_arrival
from troth.schedule.reservations import Reservation, Reservations

# Compared thousands of times per step, where a member lookup on the enum class is several times a global.
WAITING: Final = Status.WAITING
RUNNING: Final = Status.RUNNING
SETTLING: Final = Status.SETTLING
ENDED: Final = Status.ENDED

Order = Callable[[RequestState], tuple[int, ...]]

HELD_STEPS: Final = 64
"""Steps of others that a held row sits out before it makes way for a request that waits: about what a consumer that
only hesitates takes, so that it is not computed again for a moment's pause.
"""


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
        self._saves_states = limits.num_checkpoints is not None
        self.num_preemptions = 0
        self._order = order
        self._states: dict[RequestId, RequestState] = {}
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._free_rows = [Row(i) for i in range(limits.max_rows - 1, -1, -1)]
        self._releases: list[Row] = []
        self._swaps: dict[Row, list[BlockUpdate]] = {}
        """Table entries that changed since the last plan, because a row's block turned out to be known already."""
        self._in_flight: deque[_InFlight] = deque()
        self._planned: list[RequestState] = []
        self._drafting: dict[RequestState, Sequence[int]] = {}
        """Rows that wait for their commits, because somebody drafts for them -> the drafts for the next step."""
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
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row, ended ones that settle aside."""
        return sum(1 for state in self._running if state.status is RUNNING)

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
        return not (self._states or self._running or self._in_flight or self._reservations)

    def state_of(self, request_id: RequestId) -> RequestState | None:
        """The bookkeeping of a request that has not ended; read only."""
        return self._states.get(request_id)

    def states(self) -> list[RequestState]:
        """Every request with bookkeeping, settling ones included; read only."""
        return [*self._running, *self._waiting]

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
            state.num_computed = min(state.num_computed, len(state.token_ids))
            state.num_done = min(state.num_done, state.num_computed)
        self._ending = [(one, reason) for one, reason in self._ending if one is not state]
        if state.num_pending > 1:
            self._preempt(state)  # the second sample's step was fed the first one, which never was
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
        that. Drafts come without claims: too many, or for a row that cannot take any now, they are left out.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        assert not self._saves_states, "recurrent state cannot go back over rejected drafts"
        if token_ids is None:
            self._drafting.pop(state, None)
        else:
            self._drafting[state] = token_ids

    def reserve(self, namespace: str, token_ids: Sequence[int]) -> Reservation | None:
        """As Reservations.reserve, leaving running rows what they count on. Filling it takes no step."""
        return self._reservations.reserve(namespace, token_ids, self._running)

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
        self._planned = []
        if self._ending:
            self._end_all()
        preempted = self._plan_decodes(plan)
        self._plan_prefills(plan, admit_waiting=not preempted)
        if not plan.rows:
            return None
        plan.releases, self._releases = self._releases, []
        if self._swaps:
            plan.block_updates[:0] = [update for updates in self._swaps.values() for update in updates]
            self._swaps = {}
        self._num_steps += 1
        self._in_flight.append(_InFlight(plan, self._planned, [state.epoch for state in self._planned]))
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
                    self._publish(state)
            elif not samples:
                continue  # the row lost its state meanwhile; a sampled token is still good, a chunk is not
            if state.status is SETTLING:
                self._release(state)
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

    def _plan_decodes(self, plan: StepPlan) -> bool:
        """Feed one output token of every row whose gap is one, and the drafts behind it; whether a row was preempted
        to make room.
        """
        before = self.num_preemptions
        running = self._running
        saves = self._saves_states
        drafting = self._drafting
        verifying: list[tuple[RequestState, Sequence[int]]] = []
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
            if drafting and state in drafting:
                if state.num_pending:
                    continue  # drafts follow a token that is known
                if drafts := self._usable_drafts(state, plan):
                    verifying.append((state, drafts))
                    continue
            if position % BLOCK_TOKENS == 0 and not self._make_room(state, position + 1, plan):
                continue
            self._append(plan, state, 1)
            plan.token_ids.append(state.token_ids[position] if position < num_known else ON_DEVICE)
            if saves and (position + 1) % BLOCK_TOKENS == 0:
                self._plan_save(plan, state)
        plan.num_decodes = len(plan.rows)
        if drafting:
            self._plan_verifies(plan, verifying)
        return self.num_preemptions != before

    def _usable_drafts(self, state: RequestState, plan: StepPlan) -> Sequence[int]:
        """The row's drafts, as far as answer and blocks have room for them: nobody loses blocks to a guess."""
        drafts, position = self._drafting[state], state.num_computed
        drafts = drafts[: state.max_tokens - state.num_output - 1] if state.status is RUNNING else ()
        if not drafts:
            return ()
        updates = self._supply.grow(state, position + 1 + len(drafts))
        if updates is None:
            return ()
        plan.block_updates += updates
        state.last_step = plan.step_id  # its turn is promised: the rows to come must not preempt it
        return drafts

    def _plan_verifies(self, plan: StepPlan, verifying: Sequence[tuple[RequestState, Sequence[int]]]) -> None:
        """Feed the last token of these rows and their drafts; those that get none for want of room come first."""
        room = self.limits.max_samples - len(plan.rows) - len(verifying)
        shares: list[tuple[RequestState, Sequence[int]]] = []
        for state, drafts in verifying:
            shares.append((state, drafts[: max(0, room)]))
            room -= len(drafts)
        for state, drafts in sorted(shares, key=lambda share: bool(share[1])):
            position = state.num_computed
            self._append(plan, state, 1)
            plan.token_ids.append(state.token_ids[position])
            plan.token_ids.extend(drafts)
            plan.num_new[-1] += len(drafts)
            plan.num_draft[-1] = len(drafts)
            plan.num_verifies += bool(drafts)
        plan.num_decodes = len(plan.rows) - plan.num_verifies
        for state in self._drafting:
            self._drafting[state] = ()

    def _wants_decode(self, state: RequestState) -> bool:
        if state.status is RUNNING:
            # The last token of a full answer may still be in flight: feeding it would serve nobody.
            return not state.held and state.num_output < state.max_tokens
        return True

    def _plan_prefills(self, plan: StepPlan, *, admit_waiting: bool) -> None:
        """Feed prompt chunks of running rows, then of waiting requests, within this step's budget."""
        limits = self.limits
        prefilling = [s for s in self._running if (s.gap > 1 or s.num_computed < s.num_prompt) and not s.held]
        budget = limits.chunk_tokens if plan.rows else limits.step_tokens
        alone = not plan.rows and len(prefilling) + (len(self._waiting) if admit_waiting else 0) == 1
        widest = limits.step_tokens if alone else limits.chunk_tokens
        for state in prefilling:
            if budget <= 0:
                return
            if state.status is RUNNING:
                budget -= self._plan_chunk(plan, state, min(budget, widest))
        while admit_waiting and budget > 0 and self._waiting:
            idle = self._held_row(plan)
            if not self._free_rows and idle is None:
                return
            ready = (s for s in self._waiting if not s.num_pending and not s.held)
            first = next((s for s in ready if not self._supply.is_coming(s, self._running)), None)
            if first is None:
                return
            if self._admit(first, plan):
                budget -= self._plan_chunk(plan, first, min(budget, widest))
            elif idle is not None:
                self._preempt(idle)
            else:
                return

    def _plan_chunk(self, plan: StepPlan, state: RequestState, width: int) -> int:
        """Feed the row's next chunk of at most ``width`` tokens; how many it got."""
        num_known, checkpoint_at = len(state.token_ids), None
        if self._saves_states and state.prefix is not None:
            checkpoint_at = state.prefix.next_checkpoint(state.num_computed, num_known)
        step = next_prefill_step(num_known, state.num_computed, width, checkpoint_at=checkpoint_at)
        if not self._make_room(state, step.end, plan):
            return 0
        self._append(plan, state, step.end - step.start)
        plan.token_ids.extend(state.token_ids[step.start : step.end])
        if step.checkpoint or (step.final and step.end % BLOCK_TOKENS == 0):
            self._plan_save(plan, state)
        return step.end - step.start

    def _plan_save(self, plan: StepPlan, state: RequestState) -> None:
        """Keep the state that the row reaches in this step, at a block edge, for whoever shares its tokens."""
        if self._saves_states and state.prefix is not None:
            checkpoint_id = state.prefix.save(state.num_computed)
            if checkpoint_id is not None:
                plan.saves.append(CheckpointCopy(state.row, checkpoint_id))

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
        match = self._supply.start(state, self._running) if self._free_rows else None
        if match is None:
            return False
        self._waiting.remove(state)
        state.status = RUNNING
        state.row = self._free_rows.pop()
        num_cached = match.num_tokens
        if num_cached:
            for group, table in enumerate(state.tables):
                plan.block_updates.append(BlockUpdate(state.row, group, 0, list(table.block_ids)))
            if match.usable is not None and match.usable.checkpoint_id is not None:
                plan.restores.append(CheckpointCopy(state.row, match.usable.checkpoint_id))
        state.num_computed = state.num_done = num_cached
        if state.epoch == 0:
            state.num_cached = num_cached
        insort(self._running, state, key=self._order)
        plan.admissions.append(Admission(state.row, state.request, state.output_ids, num_cached))
        return True

    def _make_room(self, state: RequestState, num_tokens: int, plan: StepPlan) -> bool:
        """Give the row slots for its first ``num_tokens`` tokens, preempting held, then younger rows; False to wait.

        Rows already in this plan are not preempted: their turn this step is promised. The oldest row always gets room,
        so some request always advances.
        """
        while (updates := self._supply.grow(state, num_tokens)) is None:
            victim = next((s for s in reversed(self._running) if s.held), self._running[-1])
            if victim.last_step == plan.step_id:
                return False
            self._preempt(victim)
            if victim is state:
                return False
        plan.block_updates += updates
        return True

    def _held_row(self, plan: StepPlan) -> RequestState | None:
        """The youngest held row that others have waited for long enough, or whom alone they wait for."""
        blocked = not plan.rows and not self._in_flight
        for state in reversed(self._running):
            if state.held and (blocked or plan.step_id - state.last_step > HELD_STEPS):
                return state
        return None

    def _preempt(self, state: RequestState) -> None:
        """Take a row's blocks; it will be computed again from its tokens and continue exactly where it was."""
        if state.status is SETTLING:
            self._release(state)
            return
        self.num_preemptions += 1
        self._leave_row(state)
        state.status = WAITING
        state.num_computed = state.num_done = 0
        state.epoch += 1
        insort(self._waiting, state, key=self._order)

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

    def _end_all(self) -> None:
        """End the rows whose consumers had the chance to cut what the last commits brought."""
        ending, self._ending = self._ending, []
        for state, finish in ending:
            if state.status is not ENDED:
                self._finish(state, finish)

    def _finish(self, state: RequestState, finish: FinishReason) -> None:
        if finish == "length" and self._worth_settling(state):
            del self._states[state.request_id]
            self._drafting.pop(state, None)
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
        self._drafting.pop(state, None)
        if state.status is WAITING:
            self._waiting.remove(state)
            state.status = ENDED
        else:
            self._release(state, failed=failed)

    def _release(self, state: RequestState, *, failed: bool = False) -> None:
        self._leave_row(state, failed=failed)
        state.status = ENDED

    def _publish(self, state: RequestState) -> None:
        """Offer the blocks that the last commit completed to the prompt cache."""
        prefix = state.prefix
        assert prefix is not None
        num_tokens = min(state.num_done, len(state.token_ids))
        for group, index, block_id in prefix.publish(state.token_ids, num_tokens, state.tables):
            self._swaps.setdefault(state.row, []).append(BlockUpdate(state.row, group, index, [block_id]))
        state.publish_at = prefix.next_publish if prefix.is_open else NEVER

    def _leave_row(self, state: RequestState, *, failed: bool = False) -> None:
        if state.prefix is not None:
            if failed:
                state.prefix.discard()
            else:
                if state.prefix.has_more(min(state.num_done, len(state.token_ids))):
                    self._publish(state)
                state.prefix.leave()
            state.prefix = None
            state.publish_at = NEVER
        for table in state.tables:
            table.clear()
        self._swaps.pop(state.row, None)
        self._running.remove(state)
        self._free_rows.append(state.row)
        self._releases.append(state.row)
        state.row = NO_ROW
