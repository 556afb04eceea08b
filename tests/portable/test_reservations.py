"""Blocks that come from elsewhere: what is taken for them, when it is seen, and that all of it is given back."""

from __future__ import annotations

from collections import deque

import pytest

from tests.portable.test_prefix_index import World, ids
from tests.portable.test_scheduler import FULL, WINDOW
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS
from troth.schedule import invariants
from troth.schedule.prefix_match import Departure
from troth.schedule.reservations import Reservation


def reserved(world: World, num_tokens: int) -> Reservation:
    made = world.scheduler.reserve("", ids(num_tokens))
    assert made is not None
    invariants.check(world.scheduler)
    return made


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW), ()], ids=["full", "window", "both", "none"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_reservation_serves_a_hit_once_it_is_adopted(groups: tuple[AttentionSpec, ...], recurrent: bool) -> None:
    if not groups and not recurrent:
        return
    world = World(groups, recurrent=recurrent)
    made = reserved(world, 96)
    assert world.ask(ids(100, 5)) == 0
    world.runner.fill(made)
    world.scheduler.adopt(made.reservation_id)
    invariants.check(world.scheduler)
    assert world.ask(ids(100)) == 96
    assert all(pool.num_used == 0 for pool in world.scheduler.pools)


def test_reservation_takes_only_what_a_window_reads() -> None:
    world = World((FULL, WINDOW))
    made = reserved(world, 160)
    taken = {fill.group: (fill.first_index, len(fill.block_ids)) for fill in made.fills}
    first = WINDOW.first_needed(160)
    assert first > 0
    assert taken == {0: (0, 10), 1: (first, 10 - first)}


def test_reservation_is_seen_by_nobody_before_it_is_adopted() -> None:
    world = World()
    made = reserved(world, 96)
    assert world.ask(ids(100)) == 0
    world.runner.fill(made)
    world.scheduler.adopt(made.reservation_id)
    # The row that computed the same meanwhile came first: its blocks stay, the others are free again.
    assert world.scheduler.pools[0].num_cached == 6
    assert world.ask(ids(100)) == 96


def test_reservation_leaves_out_the_beginning_that_is_known() -> None:
    world = World()
    world.ask(ids(64), most=1)
    made = reserved(world, 96)
    assert [(fill.first_index, len(fill.block_ids)) for fill in made.fills] == [(4, 2)]
    assert world.scheduler.reserve("", ids(64)) is None
    world.runner.fill(made)
    world.scheduler.adopt(made.reservation_id)
    assert world.ask(ids(100)) == 96


def test_reservation_that_is_abandoned_leaves_nothing() -> None:
    world = World(recurrent=True, num_checkpoints=2)
    for _ in range(3):
        world.scheduler.abandon(reserved(world, 96).reservation_id)
        invariants.check(world.scheduler)
    assert world.scheduler.pools[0].num_used == world.scheduler.pools[0].num_cached == 0
    assert world.status.num_checkpoints_free == 2
    assert world.scheduler.is_idle


def test_reservation_takes_no_block_that_a_running_row_counts_on() -> None:
    world = World(num_blocks=(10,))
    world.add(ids(100, 3), most=20)
    world.step()
    # Ten, less seven of its prompt and one that it may need soon.
    assert world.scheduler.reserve("", ids(48)) is None
    world.scheduler.abandon(reserved(world, 32).reservation_id)
    world.run()
    # Cached blocks make room, the ends of texts first.
    assert reserved(world, 64).fills[0].block_ids


def test_reservation_whose_beginning_was_discarded_gives_all_back() -> None:
    """The row that computed the beginning failed while the rest was on its way."""
    world = World()
    world.add(ids(64), most=30)
    world.step()
    made = reserved(world, 96)
    assert made.fills[0].first_index > 0
    world.step(0)
    world.runner.fill(made)
    world.scheduler.adopt(made.reservation_id)
    invariants.check(world.scheduler)
    assert world.scheduler.pools[0].num_free == world.scheduler.pools[0].num_blocks
    assert world.ask(ids(100)) == 0


def test_reservation_that_made_a_row_fail_is_forgotten_and_what_was_computed_stays() -> None:
    """Damage that came from disk stayed in memory: every later request for that text failed, too."""
    world = World()
    world.ask(ids(40))
    made = reserved(world, 96)
    world.runner.fill(made)
    world.scheduler.adopt(made.reservation_id)
    hurt = world.add(ids(100), most=20)
    world.step(0)
    world.run()
    assert world.cached[hurt.request_id] == 96
    assert all(pool.num_used == 0 for pool in world.scheduler.pools)
    assert world.ask(ids(100)) == 32


def test_departures_tell_what_rows_left_and_where_others_may_begin() -> None:
    world = World((FULL, WINDOW), recurrent=True)
    world.index.departures = departures = deque()
    prompt = ids(100)
    world.ask(prompt, most=20, boundary=70, checkpoint_positions=(35,))
    (one,) = departures
    known = (*prompt, *world.said())
    assert one == Departure("", known[: 7 * BLOCK_TOKENS], (2, 4, 7))
    departures.clear()
    world.add(ids(100, 7), most=5)
    while world.step(0):
        pass
    assert not departures, "a row that failed leaves nothing"
