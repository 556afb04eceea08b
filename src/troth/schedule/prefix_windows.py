"""The sliding-window layers' share of the prefix index: which nodes still have their blocks, which lose them first.

Refuses to know the tree's other needs (``prefix_tree.py``). A node keeps its place in the tree without its block of a
window group; a row can start at the end of a node only when every block inside the window before it is there.

    window        ......[=============|   end of a turn: kept          [=============|
    blocks    1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24
    dropped   x  x  x                    x  x  x  x  x  x  x  x
"""

from __future__ import annotations

from collections.abc import Iterator

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK
from troth.schedule.block_pool import BlockPool
from troth.schedule.prefix_node import EvictionOrder, PrefixNode


class PrefixWindows:
    """The groups with a window, of all groups and pools of an index."""

    def __init__(self, groups: tuple[AttentionSpec, ...], pools: tuple[BlockPool, ...]) -> None:
        self._groups = groups
        self._pools = pools
        self._orders = {group: EvictionOrder() for group, spec in enumerate(groups) if spec.window is not None}

    def __contains__(self, group: int) -> bool:
        return group in self._orders

    def __bool__(self) -> bool:
        return bool(self._orders)

    def add(self, node: PrefixNode, group: int) -> None:
        """A node has its block of a group, which nobody is known to come back to."""
        if group in self._orders:
            self._orders[group].add(node)

    def add_all(self, node: PrefixNode) -> None:
        """A new node has the blocks that the row still had."""
        for group, block_id in enumerate(node.block_ids):
            if block_id != NO_BLOCK:
                self.add(node, group)
            else:
                assert group in self._orders, f"group {group} has no block {node.depth - 1}"

    def remove(self, node: PrefixNode, group: int) -> None:
        """A node lost its block of a group."""
        if group in self._orders:
            self._orders[group].remove(node)

    def touch(self, node: PrefixNode) -> None:
        """What a row that starts at the end of ``node`` needs is worth keeping, and was used just now."""
        for group, order in self._orders.items():
            for one in self._inside(node, group):
                if one.block_ids[group] != NO_BLOCK:
                    order.keep(one)

    def has_own(self, node: PrefixNode) -> bool:
        """Whether a node has its own block of every window group."""
        return all(node.block_ids[group] != NO_BLOCK for group in self._orders)

    def hole_before(self, node: PrefixNode) -> PrefixNode | None:
        """The last node whose block is missing inside a window before the end of ``node``."""
        holes = []
        for group in self._orders:
            hole = next((one for one in self._inside(node, group) if one.block_ids[group] == NO_BLOCK), None)
            if hole is not None:
                holes.append(hole)
        return max(holes, key=lambda hole: hole.depth, default=None)

    def reclaim(self, group: int, num_blocks: int) -> list[PrefixNode]:
        """Forget blocks that no row uses, least wanted first, until so many are free; the nodes that lost theirs."""
        pool, order = self._pools[group], self._orders[group]
        num_blocks = min(num_blocks, pool.num_cached)
        losers: list[PrefixNode] = []
        for node in order:
            if len(losers) >= num_blocks:
                break
            if not pool.references(node.block_ids[group]):
                losers.append(node)
        for node in losers:
            pool.forget(node.block_ids[group])
            node.set_block(group, NO_BLOCK)
            order.remove(node)
        return losers

    def _inside(self, node: PrefixNode, group: int) -> Iterator[PrefixNode]:
        """The nodes inside the window before the end of ``node``, that one first."""
        first = self._groups[group].first_needed(node.depth * BLOCK_TOKENS)
        while node.depth > first and node.parent is not None:
            yield node
            node = node.parent
