"""Which tokens one step feeds: decodes first, then drafts to verify, then prompt chunks within the budget.

Refuses to know how requests come and end (``scheduler.py``), and who has which row (``request_queues.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from troth.contracts.cache_spec import TRAIL_TOKENS
from troth.contracts.names import BLOCK_TOKENS
from troth.contracts.plan import NO_SAMPLE, ON_DEVICE, CheckpointCopy, StepPlan
from troth.contracts.prefill import next_prefill_step
from troth.schedule.admission import SchedulerLimits
from troth.schedule.block_supply import BlockSupply
from troth.schedule.request_queues import RUNNING, RequestQueues
from troth.schedule.request_state import RequestState


class StepPlanning:
    """Fills plans. Used by one scheduler.

    Args:
        limits: budgets.
        queues: who has a row and who waits; changed by admission and preemption.
        supply: gives drafts their blocks, if there are any to spare.
    """

    def __init__(self, limits: SchedulerLimits, queues: RequestQueues, supply: BlockSupply) -> None:
        self.drafting: dict[RequestState, Sequence[int]] = {}
        """Rows that wait for their commits, because somebody drafts for them -> the drafts for the next step."""
        self._limits = limits
        self._starts_steps = queues
        self._supply = supply
        self._saves_states = limits.num_checkpoints is not None
        self._planned: list[RequestState] = []

    def fill(self, plan: StepPlan, *, is_idle: bool) -> list[RequestState]:
        """Put into an empty plan what the next step feeds; the requests of its rows, in order.

        ``is_idle``: no other step is under way.
        """
        self._planned = []
        preempted = self._plan_decodes(plan)
        self._plan_prefills(plan, admit_waiting=not preempted, is_idle=is_idle)
        return self._planned

    def _plan_decodes(self, plan: StepPlan) -> bool:
        """Feed one output token of every row whose gap is one, and the drafts behind it; whether a row was preempted
        to make room.
        """
        before = self._starts_steps.num_preemptions
        running = self._starts_steps.running
        saves = self._saves_states
        drafting = self.drafting
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
            if position % BLOCK_TOKENS == 0 and not self._starts_steps.make_room(state, position + 1, plan):
                continue
            self._append(plan, state, 1)
            plan.token_ids.append(state.token_ids[position] if position < num_known else ON_DEVICE)
            if saves and (position + 1) % BLOCK_TOKENS == 0:
                self._plan_save(plan, state)
        plan.num_decodes = len(plan.rows)
        if drafting:
            self._plan_verifies(plan, verifying)
        return self._starts_steps.num_preemptions != before

    def _usable_drafts(self, state: RequestState, plan: StepPlan) -> Sequence[int]:
        """The row's drafts, as far as answer and blocks have room for them: nobody loses blocks to a guess."""
        drafts, position = self.drafting[state], state.num_computed
        drafts = drafts[: state.max_tokens - state.num_output - 1] if state.status is RUNNING else ()
        if self._saves_states:
            drafts = drafts[: _most_drafts(state)]
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
        room = self._limits.max_samples - len(plan.rows) - len(verifying)
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
            if self._saves_states and (position + 1) % BLOCK_TOKENS == 0:
                self._plan_save(plan, state)
        plan.num_decodes = len(plan.rows) - plan.num_verifies
        for state in self.drafting:
            self.drafting[state] = ()

    def _wants_decode(self, state: RequestState) -> bool:
        if state.status is RUNNING:
            # The last token of a full answer may still be in flight: feeding it would serve nobody.
            return not state.held and state.num_output < state.max_tokens
        return True

    def _plan_prefills(self, plan: StepPlan, *, admit_waiting: bool, is_idle: bool) -> None:
        """Feed prompt chunks of running rows, then of waiting requests, within this step's budget."""
        limits, queues = self._limits, self._starts_steps
        prefilling = [s for s in queues.running if (s.gap > 1 or s.num_computed < s.num_prompt) and not s.held]
        budget = limits.chunk_tokens if plan.rows else limits.step_tokens
        alone = not plan.rows and len(prefilling) + (len(queues.waiting) if admit_waiting else 0) == 1
        widest = limits.step_tokens if alone else limits.chunk_tokens
        for state in prefilling:
            if budget <= 0:
                return
            if state.status is RUNNING:
                budget -= self._plan_chunk(plan, state, min(budget, widest))
        while admit_waiting and budget > 0 and queues.waiting:
            held = queues.held_row(plan, is_idle=is_idle)
            if not queues.num_free and held is None:
                return
            first = queues.first_ready()
            if first is None:
                return
            if queues.admit(first, plan):
                budget -= self._plan_chunk(plan, first, min(budget, widest))
            elif held is not None:
                queues.preempt(held)
            else:
                return

    def _plan_chunk(self, plan: StepPlan, state: RequestState, width: int) -> int:
        """Feed the row's next chunk of at most ``width`` tokens; how many it got."""
        num_known, checkpoint_at = len(state.token_ids), None
        if self._saves_states and state.prefix is not None:
            checkpoint_at = state.prefix.next_checkpoint(state.num_computed, num_known)
        step = next_prefill_step(num_known, state.num_computed, width, checkpoint_at=checkpoint_at)
        if not self._starts_steps.make_room(state, step.end, plan):
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
        if state.num_recalled:
            plan.recalls[len(plan.rows)] = state.num_recalled
            state.num_recalled = 0
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


def _most_drafts(state: RequestState) -> int:
    """Drafts that a row with recurrent states may feed: as many as it can recall, and none across a missed state."""
    num_fed = state.num_computed + 1
    edge = (num_fed // BLOCK_TOKENS + 1) * BLOCK_TOKENS
    if state.prefix is not None and state.prefix.misses_state(edge):
        return min(TRAIL_TOKENS, edge - 1 - num_fed)  # so that a later step's own token completes the block
    return TRAIL_TOKENS
