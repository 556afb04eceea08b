"""What must be true of a scheduler between any two calls. Used by tests, and by ``troth doctor`` on a live engine."""

from __future__ import annotations

from collections import Counter

from troth.contracts.names import NO_BLOCK, NO_ROW
from troth.schedule.request_state import Status
from troth.schedule.scheduler import Scheduler


def check(scheduler: Scheduler, *, cached_blocks: tuple[Counter[int], ...] | None = None) -> None:
    """Assert the laws of ownership and progress.

    ``cached_blocks`` are the references a prefix cache holds, by group; None when there is no cache.

    Raises:
        AssertionError: with the values that break the law.
    """
    limits = scheduler.limits
    states = scheduler.states()
    rows = [state.row for state in states if state.row != NO_ROW]
    assert len(rows) == len(set(rows)), f"a row has two owners: {sorted(rows)}"
    assert all(0 <= row < limits.max_rows for row in rows), f"rows out of range: {rows}"
    for group, pool in enumerate(scheduler.pools):
        assert pool.num_free + pool.num_used == pool.num_blocks, f"group {group} lost blocks"
        held: Counter[int] = Counter()
        for state in states:
            if state.tables:
                held.update(b for b in state.tables[group].block_ids if b != NO_BLOCK)
        if cached_blocks is not None:
            held.update(cached_blocks[group])
        for block_id in range(pool.num_blocks):
            references = pool.references(block_id)  # type: ignore[arg-type]
            assert references == held[block_id], (
                f"group {group} block {block_id}: {references} references, {held[block_id]} holders"
            )
        assert pool.num_used == len(held), f"group {group}: {pool.num_used} used, {len(held)} held"
    for state in states:
        name = state.request.request_id
        assert 0 <= state.num_done <= state.num_computed, f"{name}: done {state.num_done} > {state.num_computed}"
        assert state.gap >= 0, f"{name}: computed more than it has ({state.gap})"
        assert state.num_output <= state.max_tokens, f"{name}: {state.num_output} > {state.max_tokens} tokens"
        if state.status is Status.WAITING:
            assert state.row == NO_ROW, f"{name} waits but holds row {state.row}"
            assert not any(table.num_live for table in state.tables), f"{name} waits but holds blocks"
