"""What must be true of a scheduler between any two calls. Used by tests, and by ``troth doctor`` on a live engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from troth.contracts.names import NO_BLOCK, NO_ROW
from troth.schedule.block_table import BlockTable
from troth.schedule.prefix_index import PrefixIndex
from troth.schedule.request_state import Status
from troth.schedule.scheduler import Scheduler


def check(scheduler: Scheduler, *, pinned: Sequence[BlockTable] = ()) -> None:
    """Assert the laws of ownership and progress.

    Args:
        pinned: the tables of ``PrefixIndex.pin``, one of each group for each pin made without the scheduler.

    Raises:
        AssertionError: with the values that break the law.
    """
    limits = scheduler.limits
    states = scheduler.states()
    rows = [state.row for state in states if state.row != NO_ROW]
    assert len(rows) == len(set(rows)), f"a row has two owners: {sorted(rows)}"
    assert all(0 <= row < limits.max_rows for row in rows), f"rows out of range: {rows}"
    for group, pool in enumerate(scheduler.pools):
        assert pool.num_free + pool.num_used + pool.num_cached == pool.num_blocks, f"group {group} lost blocks"
        held: Counter[int] = Counter()
        for state in states:
            if state.tables:
                held.update(b for b in state.tables[group].block_ids if b != NO_BLOCK)
        reserved = [one.tables[group] for one in scheduler.reservations()]
        kept = [*pinned, *scheduler.pins.tables()]
        for table in (*kept[group :: len(scheduler.pools)], *reserved):
            held.update(b for b in table.block_ids if b != NO_BLOCK)
        for block_id in range(pool.num_blocks):
            references = pool.references(block_id)  # type: ignore[arg-type]
            assert references == held[block_id], (
                f"group {group} block {block_id}: {references} references, {held[block_id]} holders"
            )
        assert pool.num_used == len(held), f"group {group}: {pool.num_used} used, {len(held)} held"
        if scheduler.prefix_index is None:
            assert not pool.num_cached, f"group {group}: {pool.num_cached} blocks cached without a cache"
            assert all(count == 1 for count in held.values()), f"group {group}: a block has two rows"
    if scheduler.prefix_index is not None:
        _check_index(scheduler, scheduler.prefix_index)
    for state in states:
        name = state.request.request_id
        assert 0 <= state.num_done <= state.num_computed, f"{name}: done {state.num_done} > {state.num_computed}"
        assert state.gap >= 0, f"{name}: computed more than it has ({state.gap})"
        assert state.num_output <= state.max_tokens, f"{name}: {state.num_output} > {state.max_tokens} tokens"
        if state.status is Status.WAITING:
            assert state.row == NO_ROW, f"{name} waits but holds row {state.row}"
            assert not any(table.num_live for table in state.tables), f"{name} waits but holds blocks"


def _check_index(scheduler: Scheduler, index: PrefixIndex) -> None:
    """What the prompt cache lists is listed once, and only rows and pins keep it from being evicted."""
    nodes, evictable = index.nodes(), index.evictable()
    for group, pool in enumerate(scheduler.pools):
        listed = [node.block_ids[group] for node in nodes if node.parent and node.block_ids[group] != NO_BLOCK]
        assert len(listed) == len(set(listed)), f"group {group}: a block is listed twice"
        assert all(pool.is_listed(block_id) for block_id in listed), f"group {group}: a listed block is unknown"
        cached = sum(1 for block_id in listed if not pool.references(block_id))
        assert pool.num_cached == cached, f"group {group}: {pool.num_cached} cached, {cached} listed and not held"
    saved = [node.checkpoint_id for node in nodes if node.checkpoint_id is not None]
    assert len(saved) == len(set(saved)), "a checkpoint hangs on two nodes"
    places = Counter(id(state.prefix.node) for state in scheduler.states() if state.prefix is not None)
    places.update(id(one.place.node) for one in scheduler.reservations())
    for node in nodes:
        where = f"node of {node.depth} blocks"
        assert node.alive, f"{where}: dead, but still listed"
        assert node.leases == places[id(node)] + node.pins, f"{where}: {node.leases} leases, {places[id(node)]} rows"
        if not node.leases and not node.children:
            assert node in evictable, f"{where}: nobody needs it, and it will never be evicted"
    if index.checkpoints is not None:
        pending = sum(state.prefix.num_pending for state in scheduler.states() if state.prefix is not None)
        pending += sum(one.checkpoint_id is not None for one in scheduler.reservations())
        taken = index.checkpoints.num_checkpoints - index.checkpoints.num_free
        assert taken == len(saved) + pending, f"{taken} checkpoints taken, {len(saved)} listed, {pending} on their way"
