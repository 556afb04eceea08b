"""Room for blocks that come from elsewhere than a step: taken first, filled by others, then listed in the prompt cache.

Refuses to know where their content comes from (``run/disk_cache.py``). Nobody sees a reserved block before it is
adopted; until then it counts as used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from troth.contracts.names import BLOCK_TOKENS, BlockId, CheckpointId
from troth.schedule.block_supply import BlockSupply
from troth.schedule.block_table import BlockTable
from troth.schedule.prefix_match import PrefixPlace
from troth.schedule.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Fill:
    """Blocks of one group to be filled, in order of position."""

    group: int
    first_index: int
    """Which block of the text the first of them is."""
    block_ids: list[BlockId]


@dataclass(slots=True)
class Reservation:
    """One text's blocks on their way into the prompt cache. Like a row, it holds references and one lease."""

    reservation_id: int
    token_ids: tuple[int, ...]
    tables: list[BlockTable]
    place: PrefixPlace
    fills: list[Fill]
    """What must be filled before it is adopted; beginnings that are known already are not among it."""
    checkpoint_id: CheckpointId | None
    """To be filled with the recurrent state after all tokens."""


class Reservations:
    """Those under way."""

    def __init__(self, supply: BlockSupply) -> None:
        self._supply = supply
        self._by_id: dict[int, Reservation] = {}
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> list[Reservation]:
        """Every one under way; read only."""
        return list(self._by_id.values())

    def reserve(self, namespace: str, token_ids: Sequence[int], running: Sequence[RequestState]) -> Reservation | None:
        """Take room for what a prompt cache hit after these whole blocks needs and does not have.

        Cached blocks make room, running rows do not. None, and nothing taken, when there is none, when there is no
        prompt cache, or when all of it is known.
        """
        index, num_tokens = self._supply.index, len(token_ids)
        assert num_tokens % BLOCK_TOKENS == 0, f"{num_tokens} tokens are not whole blocks"
        if index is None:
            return None
        # A token more, because a match never covers all of what it is asked for.
        match = index.match(namespace, [*token_ids, 0])
        if match.num_tokens >= num_tokens:
            return None
        tables = self._supply.tables()
        place = index.take(match, namespace, tables)
        for table in tables:
            table.start_at(num_tokens)
        if not self._supply.has_spare([table.missing(num_tokens) for table in tables], running):
            index.give_back(place, tables)
            return None
        checkpoint_id = None
        if index.checkpoints is not None:
            checkpoint_id = index.take_checkpoint()
            if checkpoint_id is None:
                index.give_back(place, tables)
                return None
        fills = []
        for group, table in enumerate(tables):
            first, taken = len(table.block_ids), table.grow(num_tokens)
            assert taken is not None, "the pool was checked above"
            if taken:
                fills.append(Fill(group, first, taken))
        made = Reservation(self._num_made, tuple(token_ids), tables, place, fills, checkpoint_id)
        self._num_made += 1
        self._by_id[made.reservation_id] = made
        return made

    def adopt(self, reservation_id: int) -> None:
        """The blocks are filled: list them, as if a row had computed them and left."""
        one, index = self._by_id.pop(reservation_id), self._supply.index
        assert index is not None
        num_tokens = len(one.token_ids)
        index.extend(one.place, one.token_ids, num_tokens, one.tables)
        if one.checkpoint_id is not None:
            index.attach(one.place, num_tokens, one.checkpoint_id, keep=True)
        index.note_restored(one.place)
        index.leave(one.place)
        for table in one.tables:
            table.clear()

    def abandon(self, reservation_id: int) -> None:
        """The blocks will not be filled: give them back."""
        one, index = self._by_id.pop(reservation_id), self._supply.index
        assert index is not None
        if one.checkpoint_id is not None:
            index.release_checkpoint(one.checkpoint_id)
        index.give_back(one.place, one.tables)
