"""Which tokens' state the caches still hold: a tree of whole blocks, found again by comparing tokens.

Refuses to know rows and steps (``row_prefix.py``, ``scheduler.py``) and bytes of tensors (``cache/``). Integers only.
Read next: ``prefix_tree.py`` for the tree, and for what of it goes first.

Ownership: the index lists blocks in their pools (``BlockPool.remember``) and owns the checkpoints it was given. A row
holds references of its own to every block it uses, and one lease on the deepest node it has reached. Cached blocks are
free memory that still remembers: nothing is evicted before somebody needs the room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, BlockId, CheckpointId
from troth.contracts.prefix_cache import PrefixCacheStatus
from troth.schedule.block_pool import BlockPool
from troth.schedule.block_table import BlockTable
from troth.schedule.checkpoint_pool import CheckpointPool
from troth.schedule.prefix_checkpoints import PrefixCheckpoints
from troth.schedule.prefix_match import Departure, PrefixCounts, PrefixMatch, PrefixPlace
from troth.schedule.prefix_node import PrefixNode
from troth.schedule.prefix_tree import PrefixTree, descend


class PrefixIndex:
    """The prompt cache of one engine. Not thread-safe: the scheduler calls it.

    Args:
        groups: attention groups, in order.
        pools: their blocks, shared with the scheduler.
        checkpoints: where recurrent states can be saved; None: the model keeps none.
        checkpoint_bytes: of one checkpoint.
    """

    def __init__(
        self,
        groups: tuple[AttentionSpec, ...],
        pools: tuple[BlockPool, ...],
        checkpoints: CheckpointPool | None = None,
        checkpoint_bytes: int = 0,
    ) -> None:
        self.checkpoints = checkpoints
        self.departures: deque[Departure] | None = None
        """Filled when somebody puts a deque here, and takes out of it what rows leave behind."""
        self._groups = groups
        self._pools = pools
        self._checkpoint_bytes = checkpoint_bytes
        self._saved = None if checkpoints is None else PrefixCheckpoints(checkpoints, checkpoint_bytes)
        self._tree = PrefixTree(groups, pools, self._saved)
        self._clock = 0
        self._counts = PrefixCounts()

    @property
    def keeps_ends(self) -> bool:
        """Whether it matters where others may come back: attention over everything before can stop at any block."""
        return self._tree.has_windows or self.checkpoints is not None

    # Looking up

    def match(self, namespace: str, token_ids: Sequence[int], start: PrefixNode | None = None) -> PrefixMatch:
        """The longest usable prefix of ``token_ids``, never all of them. Changes nothing.

        Args:
            namespace: requests of different ones share nothing.
            token_ids: at least one.
            start: ``deepest`` of an earlier match of the same tokens, or of fewer: not compared again.
        """
        node = start if start is not None and start.alive else self._tree.root(namespace)
        if node is None:
            return PrefixMatch(None, None, "miss")
        node = descend(node, token_ids, (len(token_ids) - 1) // BLOCK_TOKENS)
        usable, reason = self._tree.deepest_usable(node)
        if node.parent is None:
            reason = "miss"
        return PrefixMatch(usable, node, reason)

    def chain(self, namespace: str, token_ids: Sequence[int]) -> list[PrefixNode]:
        """The nodes of the whole blocks of ``token_ids`` that are remembered, from the first. Changes nothing."""
        root = self._tree.root(namespace)
        node = None if root is None else descend(root, token_ids, len(token_ids) // BLOCK_TOKENS)
        found: list[PrefixNode] = []
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def take(self, match: PrefixMatch, namespace: str, tables: Sequence[BlockTable]) -> PrefixPlace:
        """Give a row the prefix: its tables, empty so far, take references to the blocks, the place takes a lease."""
        node = match.usable or self._tree.root(namespace) or self._tree.new_root(namespace)
        node.leases += 1
        for group, table in enumerate(tables):
            table.adopt(self._tree.blocks_before(node, group))
        return PrefixPlace(node)

    def give_back(self, place: PrefixPlace, tables: Sequence[BlockTable]) -> None:
        """Undo ``take``: nothing was used after all, so nothing counts as used."""
        for table in tables:
            table.clear()
        place.node.leases -= 1
        self._tree.settle(place.node)

    def accept(self, match: PrefixMatch) -> None:
        """The row starts from what it took: recency and counters move."""
        self._counts.note(match)
        if match.usable is not None and match.usable.parent is not None:
            self._tree.touch(match.usable)

    # Publishing

    def extend(
        self, place: PrefixPlace, token_ids: Sequence[int], num_tokens: int, tables: Sequence[BlockTable]
    ) -> list[tuple[int, int, BlockId]]:
        """List the row's whole blocks up to ``num_tokens`` committed tokens.

        A block that is known already is swapped for the known one, so that equal tokens are held once.

        Returns:
            (group, index, block id) of each table entry that changed.
        """
        node = place.node
        swaps: list[tuple[int, int, BlockId]] = []
        if not node.alive:
            return swaps
        node.leases -= 1
        for depth in range(node.depth, num_tokens // BLOCK_TOKENS):
            at = depth * BLOCK_TOKENS
            key = tuple(token_ids[at : at + BLOCK_TOKENS])
            child = node.children.get(key)
            if child is None:
                child = self._tree.add(node, key, tuple([table.block_ids[depth] for table in tables]))
                wrote = True
            else:
                wrote = self._tree.merge(child, depth, tables, swaps)
            if wrote and place.first_written is None:
                place.first_written = child
            node = child
        node.leases += 1
        place.node = node
        return swaps

    def attach(
        self, place: PrefixPlace, num_tokens: int, checkpoint_id: CheckpointId, *, keep: bool
    ) -> PrefixNode | None:
        """Hang the state after ``num_tokens`` published tokens on their node; the index owns the checkpoint now.

        Args:
            keep: whether somebody is likely to come back to it.

        Returns:
            The node that took it, or None when it was not wanted (known already, or the row's chain was discarded).
        """
        assert self._saved is not None
        node = place.node
        while node.depth * BLOCK_TOKENS > num_tokens and node.parent is not None:
            node = node.parent
        if not node.alive or node.depth * BLOCK_TOKENS != num_tokens or node.checkpoint_id is not None:
            self.release_checkpoint(checkpoint_id)
            return None
        self._saved.attach(node, checkpoint_id, keep=keep)
        place.first_written = place.first_written or node
        return node

    def keep_end(self, place: PrefixPlace, num_tokens: int) -> None:
        """Mark what a hit after ``num_tokens`` published tokens needs as worth keeping."""
        node = place.node
        while node.depth * BLOCK_TOKENS > num_tokens and node.parent is not None:
            node = node.parent
        self.keep(node)

    def keep(self, node: PrefixNode) -> None:
        """Mark what a hit at the end of ``node`` needs as worth keeping."""
        if node.alive and node.parent is not None:
            self._tree.touch(node)

    def supersede(self, node: PrefixNode) -> None:
        """A later checkpoint of the same row stands in for the one at ``node``, unless somebody came back to that."""
        if self._saved is not None and node.alive and self._saved.is_passing(node):
            self._saved.drop(node)
            self._tree.settle(node)

    def leave(self, place: PrefixPlace) -> None:
        """The row is done with its place; what it published stays, as fresh as can be."""
        node = place.node
        if not node.alive:
            return
        node.leases -= 1
        self._clock += 1
        node.last_used = self._clock
        self._tree.touch(node)
        self._tree.settle(node)

    def note_departure(self, place: PrefixPlace, ends: Sequence[int]) -> None:
        """The row will leave its place; ``ends``: blocks after which others may begin, ascending."""
        if self.departures is None or not place.node.alive:
            return
        keys, node = [], place.node
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        if keys:
            kept = (*(end for end in ends if end < len(keys)), len(keys))
            token_ids = tuple(token_id for key in reversed(keys) for token_id in key)
            self.departures.append(Departure(node.namespace, token_ids, kept))

    def note_restored(self, place: PrefixPlace) -> None:
        """What was written of a place came from elsewhere: nobody here has computed with it yet."""
        node = place.node
        while place.first_written is not None and node.parent is not None and node.depth >= place.first_written.depth:
            node.is_restored = True
            node = node.parent

    def discard(self, place: PrefixPlace) -> None:
        """The row failed: forget what it computed, what it was given from elsewhere, and all that was built on either.

        What others computed stays: it was well for them.
        """
        if place.node.alive:
            place.node.leases -= 1
        doubted, node = place.first_written, place.node
        while node.parent is not None:
            if node.is_restored and (doubted is None or node.depth < doubted.depth):
                doubted = node
            node = node.parent
        if doubted is not None and doubted.alive:
            self._tree.remove_below(doubted)
        elif place.node.alive:
            self._tree.settle(place.node)

    def pin(self, namespace: str, token_ids: Sequence[int]) -> tuple[PrefixPlace, list[BlockTable]] | None:
        """Keep the longest usable prefix of some tokens until ``unpin``; None when nothing of them is held."""
        match = self.match(namespace, [*token_ids, 0])
        if match.num_tokens == 0 or match.usable is None:
            return None
        tables = [BlockTable(spec, pool) for spec, pool in zip(self._groups, self._pools, strict=True)]
        place = self.take(match, namespace, tables)
        place.node.pins += 1
        return place, tables

    def unpin(self, place: PrefixPlace, tables: Sequence[BlockTable]) -> None:
        """Let a pinned prefix go the way of the others."""
        place.node.pins -= 1
        for table in tables:
            table.clear()
        self.leave(place)

    # Making room

    def reclaim(self, group: int, num_blocks: int) -> int:
        """As PrefixTree.reclaim: make blocks of a group free; how many became so."""
        return self._tree.reclaim(group, num_blocks)

    def take_checkpoint(self) -> CheckpointId | None:
        """As PrefixTree.take_checkpoint: a place for a state, now the caller's; None when there is none."""
        return self._tree.take_checkpoint()

    def release_checkpoint(self, checkpoint_id: CheckpointId) -> None:
        """Give back a checkpoint that was never attached."""
        assert self.checkpoints is not None
        self.checkpoints.release(checkpoint_id)

    def status(self) -> PrefixCacheStatus:
        """A snapshot."""
        blocks = tuple(pool.num_cached for pool in self._pools)
        of_blocks = sum(count * spec.bytes_per_block for count, spec in zip(blocks, self._groups, strict=True))
        sizes = [spec.bytes_per_block for spec in self._groups]
        pool_bytes = sum(pool.num_blocks * size for pool, size in zip(self._pools, sizes, strict=True))
        free_bytes = sum(pool.num_free * size for pool, size in zip(self._pools, sizes, strict=True))
        if self.checkpoints is not None:
            pool_bytes += self.checkpoints.num_checkpoints * self._checkpoint_bytes
            free_bytes += self.checkpoints.num_free * self._checkpoint_bytes
        return PrefixCacheStatus(
            num_blocks=blocks,
            pool_bytes=pool_bytes,
            free_bytes=free_bytes,
            num_checkpoints=0 if self._saved is None else len(self._saved),
            num_checkpoints_free=0 if self.checkpoints is None else self.checkpoints.num_free,
            cached_bytes=of_blocks + (0 if self._saved is None else self._saved.total_bytes),
            num_hit_tokens=self._counts.num_hit_tokens,
            num_admissions=dict(self._counts.outcomes),
            num_refused_tokens=dict(self._counts.refused_tokens),
            num_evicted_blocks=self._tree.num_evicted_blocks,
            num_evicted_checkpoints=self._tree.num_evicted_checkpoints,
        )

    def evictable(self) -> set[PrefixNode]:
        """The leaves whose turn to be evicted will come. For checks."""
        return self._tree.evictable()

    def nodes(self) -> list[PrefixNode]:
        """Every node, roots included; read only. For checks."""
        return self._tree.nodes()
