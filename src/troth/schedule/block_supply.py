"""Where rows get their blocks: from the prompt cache what is known, from the pools what is free, or forgotten.

Refuses to know plans and who comes first (``scheduler.py``). Next: ``block_table.py`` for the blocks of one row,
``prefix_index.py`` for what is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence

from troth.contracts.names import BLOCK_TOKENS
from troth.contracts.plan import BlockUpdate
from troth.schedule.admission import SchedulerLimits, blocks_at_admission
from troth.schedule.block_pool import BlockPool
from troth.schedule.block_table import BlockTable
from troth.schedule.checkpoint_pool import CheckpointPool
from troth.schedule.prefix_index import PrefixIndex
from troth.schedule.prefix_match import PrefixMatch
from troth.schedule.request_state import RequestState
from troth.schedule.row_prefix import RowPrefix


class BlockSupply:
    """Owns the pools of one scheduler and its prompt cache."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.pools = tuple(BlockPool(count) for count in limits.num_blocks)
        self.index: PrefixIndex | None = None
        """The prompt cache, if there is one."""
        self._limits = limits
        # Without a place for its states, nothing of a recurrent model could ever be used again.
        if limits.prompt_cache and limits.num_checkpoints != 0:
            checkpoints = None if limits.num_checkpoints is None else CheckpointPool(limits.num_checkpoints)
            self.index = PrefixIndex(limits.groups, self.pools, checkpoints, limits.checkpoint_bytes)

    def start(self, state: RequestState, running: Sequence[RequestState]) -> PrefixMatch | None:
        """Give a waiting request the blocks of its longest usable prefix, if there is room for the rest of it too.

        Returns:
            What the prompt cache had, now in the request's tables; None, and nothing taken, when it must wait.
        """
        index, groups = self.index, self._limits.groups
        match = self._match(state)
        needed = blocks_at_admission(groups, len(state.token_ids), self._limits.step_tokens)
        # Every running row may need a block soon; admitting into their last blocks would preempt someone at once.
        wanted = [count + len(running) + self._promised(group, running) for group, count in enumerate(needed)]
        num_known = match.num_tokens // BLOCK_TOKENS
        for count, pool in zip(wanted, self.pools, strict=True):
            if count - num_known > pool.num_free + pool.num_cached:
                return None
        state.tables = self.tables()
        place = None
        if index is not None and state.request.prompt_cache:
            # Taken before room is made, so that making room cannot take it away.
            place = index.take(match, state.request.namespace, state.tables)
        for group, table in enumerate(state.tables):
            if not self._has_free(group, wanted[group] - table.num_live):
                if index is not None and place is not None:
                    index.give_back(place, state.tables)
                state.tables = []
                return None
        if index is not None:
            index.accept(match)
            if place is not None:
                state.prefix = RowPrefix(index, place, state.request, self._limits.checkpoint_interval_tokens)
                state.publish_at = state.prefix.next_publish
        return match

    def is_coming(self, state: RequestState, running: Sequence[RequestState]) -> bool:
        """Whether a step under way computes the next block of a waiting request, which will find it a step later.

        Without this, requests that arrive together would each compute what they share.
        """
        computing = [one for one in running if one.num_computed >= one.publish_at]
        if not computing:
            return False
        node = self._match(state).deepest
        if node is None:
            return False
        at, end = node.depth * BLOCK_TOKENS, (node.depth + 1) * BLOCK_TOKENS
        block = state.token_ids[at:end]
        return len(state.token_ids) > end and any(
            one.prefix is not None and one.prefix.node is node and one.token_ids[at:end] == block for one in computing
        )

    def grow(self, state: RequestState, num_tokens: int) -> list[BlockUpdate] | None:
        """Give a row slots for its first ``num_tokens`` tokens in every group; None, and nothing taken, for no room."""
        for group, table in enumerate(state.tables):
            # Steps run in order, so a step under way has read a dropped block before a later one writes to it.
            table.drop_before(state.num_computed)
            if not self._has_free(group, table.missing(num_tokens)):
                return None
        updates: list[BlockUpdate] = []
        for group, table in enumerate(state.tables):
            first = len(table.block_ids)
            new_ids = table.grow(num_tokens)
            assert new_ids is not None, "the pool was checked above"
            if new_ids:
                updates.append(BlockUpdate(state.row, group, first, new_ids))
        return updates

    def tables(self) -> list[BlockTable]:
        """Empty block tables, one of each group."""
        return [BlockTable(spec, pool) for spec, pool in zip(self._limits.groups, self.pools, strict=True)]

    def has_spare(self, num_blocks: Sequence[int], running: Sequence[RequestState]) -> bool:
        """Whether so many blocks of each group are free, now or after the prompt cache forgot some, that no running
        row will miss.
        """
        wanted = [count + len(running) + self._promised(group, running) for group, count in enumerate(num_blocks)]
        if any(count > pool.num_free + pool.num_cached for count, pool in zip(wanted, self.pools, strict=True)):
            return False
        return all(self._has_free(group, count) for group, count in enumerate(wanted))

    def _match(self, state: RequestState) -> PrefixMatch:
        """What the prompt cache has for a waiting request."""
        request = state.request
        if self.index is None or not request.prompt_cache:
            return PrefixMatch(None, None, "off")
        if request.sampling.prompt_logprobs is not None:
            return PrefixMatch(None, None, "prompt_logprobs")
        match = self.index.match(request.namespace, state.token_ids, state.matched)
        state.matched = match.deepest
        return match

    def _promised(self, group: int, running: Sequence[RequestState]) -> int:
        """Blocks of a group that running prompts still count on."""
        promised = 0
        for state in running:
            if state.gap > 1:
                spec = self._limits.groups[group]
                whole = spec.blocks_for(len(state.token_ids), self._limits.step_tokens)
                promised += max(0, whole - state.tables[group].num_live)
        return promised

    def _has_free(self, group: int, num_blocks: int) -> bool:
        """Whether so many blocks are free, now or after the prompt cache forgot some."""
        lacking = num_blocks - self.pools[group].num_free
        if lacking <= 0:
            return True
        return self.index is not None and self.index.reclaim(group, lacking) >= lacking
