"""Who has a row, who waits for one, and how blocks go from one to the other.

Refuses to know steps and budgets (``step_planning.py``) and how requests come and end (``scheduler.py``). Where blocks
come from is ``block_supply.py``'s.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Final

from troth.contracts.names import NO_ROW, Row
from troth.contracts.plan import Admission, BlockUpdate, CheckpointCopy, StepPlan
from troth.schedule.block_supply import BlockSupply
from troth.schedule.request_state import NEVER, RequestState, Status

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


class RequestQueues:
    """Owns the queue, the rows and what the next plan must tell of them. Used by one scheduler.

    Args:
        supply: gives rows their blocks.
        num_rows: of the persistent batch.
        order: who comes first, and is preempted last.
    """

    def __init__(self, supply: BlockSupply, num_rows: int, order: Order) -> None:
        self.waiting: list[RequestState] = []
        """Requests without a row, in order."""
        self.running: list[RequestState] = []
        """Those with one, in order."""
        self.num_preemptions = 0
        self._supply = supply
        self._order = order
        self._free_rows = [Row(i) for i in range(num_rows - 1, -1, -1)]
        self._releases: list[Row] = []
        self._swaps: dict[Row, list[BlockUpdate]] = {}
        """Table entries that changed since the last plan, because a row's block turned out to be known already."""

    @property
    def num_free(self) -> int:
        """Rows nobody has."""
        return len(self._free_rows)

    def enqueue(self, state: RequestState) -> None:
        """Have a request wait for a row."""
        insort(self.waiting, state, key=self._order)

    def first_ready(self) -> RequestState | None:
        """The first request that waits for nothing but a row."""
        ready = (state for state in self.waiting if not state.num_pending and not state.held)
        return next((state for state in ready if not self._supply.is_coming(state, self.running)), None)

    def admit(self, state: RequestState, plan: StepPlan) -> bool:
        """Give a waiting request a row and the promise of its prompt's blocks; False when it must wait."""
        match = self._supply.start(state, self.running) if self._free_rows else None
        if match is None:
            return False
        self.waiting.remove(state)
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
        insort(self.running, state, key=self._order)
        plan.admissions.append(Admission(state.row, state.request, state.output_ids, num_cached))
        return True

    def make_room(self, state: RequestState, num_tokens: int, plan: StepPlan) -> bool:
        """Give the row slots for its first ``num_tokens`` tokens, preempting held, then younger rows; False to wait.

        Rows already in this plan are not preempted: their turn this step is promised. The oldest row always gets room,
        so some request always advances.
        """
        while (updates := self._supply.grow(state, num_tokens)) is None:
            victim = next((s for s in reversed(self.running) if s.held), self.running[-1])
            if victim.last_step == plan.step_id:
                return False
            self.preempt(victim)
            if victim is state:
                return False
        plan.block_updates += updates
        return True

    def held_row(self, plan: StepPlan, *, is_idle: bool) -> RequestState | None:
        """The youngest held row that others have waited for long enough, or whom alone they wait for.

        ``is_idle``: no other step is under way.
        """
        blocked = is_idle and not plan.rows
        for state in reversed(self.running):
            if state.held and (blocked or plan.step_id - state.last_step > HELD_STEPS):
                return state
        return None

    def preempt(self, state: RequestState) -> None:
        """Take a row's blocks; it will be computed again from its tokens and continue exactly where it was."""
        if state.status is SETTLING:
            self.release(state)
            return
        self.num_preemptions += 1
        self._leave_row(state)
        state.status = WAITING
        state.num_computed = state.num_done = state.num_recalled = 0
        state.epoch += 1
        self.enqueue(state)

    def end(self, state: RequestState, *, failed: bool) -> None:
        """Take a request out of the queue or out of its row; of one that failed nothing stays in the prompt cache."""
        if state.status is WAITING:
            self.waiting.remove(state)
            state.status = ENDED
        else:
            self.release(state, failed=failed)

    def release(self, state: RequestState, *, failed: bool = False) -> None:
        """Give up the row of a request that has ended."""
        self._leave_row(state, failed=failed)
        state.status = ENDED

    def publish(self, state: RequestState) -> None:
        """Offer the blocks that the last commit completed to the prompt cache."""
        prefix = state.prefix
        assert prefix is not None
        num_tokens = min(state.num_done, len(state.token_ids))
        for group, index, block_id in prefix.publish(state.token_ids, num_tokens, state.tables):
            self._swaps.setdefault(state.row, []).append(BlockUpdate(state.row, group, index, [block_id]))
        state.publish_at = prefix.next_publish if prefix.is_open else NEVER

    def hand_over(self, plan: StepPlan) -> None:
        """Tell a plan which rows were given up and which table entries changed since the last one."""
        plan.releases, self._releases = self._releases, []
        if self._swaps:
            plan.block_updates[:0] = [update for updates in self._swaps.values() for update in updates]
            self._swaps = {}

    def _leave_row(self, state: RequestState, *, failed: bool = False) -> None:
        if state.prefix is not None:
            if failed:
                state.prefix.discard()
            else:
                if state.prefix.has_more(min(state.num_done, len(state.token_ids))):
                    self.publish(state)
                state.prefix.leave()
            state.prefix = None
            state.publish_at = NEVER
        for table in state.tables:
            table.clear()
        self._swaps.pop(state.row, None)
        self.running.remove(state)
        self._free_rows.append(state.row)
        self._releases.append(state.row)
        state.row = NO_ROW
