"""The nodes of the prefix index: how they hang together, what each still holds, and which lose it first.

Refuses to know who uses a prefix and why one is worth keeping (``prefix_index.py``, which alone calls this).

    root of a namespace - [16 tokens] - [16 tokens] - [16 tokens]        a node: its block of each attention group,
                                     `- [16 tokens]                      perhaps a checkpoint of the recurrent state

| layers | a prefix can be used up to a node that | under pressure |
|---|---|---|
| attention | has its block, as all its ancestors have | leaves go, used longest ago first |
| sliding window | has the blocks inside the window before its end | blocks go anywhere, at the ends of turns last |
| recurrent | has a checkpoint | checkpoints go anywhere, at the ends of turns last |
"""

from __future__ import annotations

from collections.abc import Sequence

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK, BlockId, CheckpointId
from troth.contracts.prefix_cache import PrefixOutcome
from troth.schedule.block_pool import BlockPool
from troth.schedule.block_table import BlockTable
from troth.schedule.prefix_checkpoints import PrefixCheckpoints
from troth.schedule.prefix_node import LeafOrder, PrefixNode, TokenBlock
from troth.schedule.prefix_windows import PrefixWindows


class PrefixTree:
    """Owns the nodes, and lists their blocks in the pools.

    Args:
        groups: attention groups, in order.
        pools: their blocks.
        saved: the checkpoints that hang on nodes; None: the model keeps no recurrent state.
    """

    def __init__(
        self, groups: tuple[AttentionSpec, ...], pools: tuple[BlockPool, ...], saved: PrefixCheckpoints | None
    ) -> None:
        self._groups = groups
        self._pools = pools
        self._saved = saved
        self._windows = PrefixWindows(groups, pools)
        self.has_windows = bool(self._windows)
        """Whether any group forgets what lies behind a window."""
        self._roots: dict[str, PrefixNode] = {}
        self._leaves = LeafOrder()
        self.num_evicted_blocks = 0
        self.num_evicted_checkpoints = 0

    # Looking

    def root(self, namespace: str) -> PrefixNode | None:
        """Where a namespace begins; None: nothing of it is remembered."""
        return self._roots.get(namespace)

    def deepest_usable(self, node: PrefixNode) -> tuple[PrefixNode, PrefixOutcome]:
        """The last node of the chain that a row could start from, and why not a later one."""
        outcome: PrefixOutcome = "hit"
        while node.parent is not None:
            if self._saved is not None and node.checkpoint_id is None:
                outcome, node = "no_checkpoint", node.parent
                continue
            hole = self._windows.hole_before(node)
            if hole is None:
                break
            assert hole.parent is not None
            outcome, node = "window_lost", hole.parent
        return node, outcome

    def blocks_before(self, node: PrefixNode, group: int) -> list[BlockId]:
        """The table of a row that starts at the end of ``node``."""
        first = self._groups[group].first_needed(node.depth * BLOCK_TOKENS)
        block_ids = [NO_BLOCK] * node.depth
        while node.depth > first and node.parent is not None:
            block_ids[node.depth - 1] = node.block_ids[group]
            node = node.parent
        return block_ids

    def evictable(self) -> set[PrefixNode]:
        """The leaves whose turn to be evicted will come. For checks."""
        return self._leaves.nodes()

    def nodes(self) -> list[PrefixNode]:
        """Every node, roots included; read only. For checks."""
        found = list(self._roots.values())
        for node in found:
            found.extend(node.children.values())
        return found

    # Growing

    def new_root(self, namespace: str) -> PrefixNode:
        """The root of a namespace of which nothing is remembered."""
        made = self._roots[namespace] = PrefixNode(None, (), namespace, ())
        return made

    def add(self, parent: PrefixNode, key: TokenBlock, block_ids: tuple[BlockId, ...]) -> PrefixNode:
        """Hang a block of tokens, and what a row holds of it, below a node that has no such child."""
        node = parent.children[key] = PrefixNode(parent, key, parent.namespace, block_ids)
        for pool, block_id in zip(self._pools, block_ids, strict=True):
            if block_id != NO_BLOCK:
                pool.remember(block_id)
        if self.has_windows:
            self._windows.add_all(node)
        return node

    def merge(
        self, node: PrefixNode, index: int, tables: Sequence[BlockTable], swaps: list[tuple[int, int, BlockId]]
    ) -> bool:
        """Let a row that computed a known block use the known one; whether the node took a block of the row's.

        Args:
            index: place of the block in the row's tables, which may change.
            swaps: gets (group, index, block id) of each table entry that changed.
        """
        wrote = False
        for group, table in enumerate(tables):
            own, known = table.block_ids[index], node.block_ids[group]
            if own in (known, NO_BLOCK):
                continue
            if known == NO_BLOCK:
                node.set_block(group, own)
                self._pools[group].remember(own)
                self._windows.add(node, group)
                wrote = True
            else:
                table.swap(index, known)
                swaps.append((group, index, known))
        return wrote

    def touch(self, node: PrefixNode) -> None:
        """What a hit at the end of ``node`` needs is worth keeping, and was used just now."""
        if self._saved is not None:
            self._saved.touch(node)
        self._windows.touch(node)

    # Making room

    def reclaim(self, group: int, num_blocks: int) -> int:
        """Forget blocks until ``num_blocks`` more of ``group`` are free, or none are left; how many became free."""
        pool = self._pools[group]
        before = pool.num_free
        if group in self._windows:
            for node in self._windows.reclaim(group, num_blocks):
                self.settle(node)
        else:
            while pool.num_free < before + num_blocks and pool.num_cached:
                leaf = self._leaves.pop()
                if leaf is None:
                    break
                self._evict(leaf)
        self.num_evicted_blocks += pool.num_free - before
        return pool.num_free - before

    def take_checkpoint(self) -> CheckpointId | None:
        """A place for a state, now the caller's; the least wanted checkpoint makes room. None when there is none."""
        assert self._saved is not None
        taken = self._saved.pool.take()
        if taken is None:
            node = self._saved.least_wanted()
            if node is None:
                return None
            self.num_evicted_checkpoints += 1
            self._saved.drop(node)
            self.settle(node)
            taken = self._saved.pool.take()
        return taken

    def settle(self, node: PrefixNode) -> None:
        """Something was taken from a node: it may be a leaf now, which can be evicted, or of no use at all."""
        while node.alive and not node.leases and not node.children:
            parent = node.parent
            if parent is None:
                node.alive = False
                del self._roots[node.namespace]
                return
            if self._is_of_use(node):
                self._leaves.add(node)
                return
            self._remove(node)
            node = parent

    def remove_below(self, node: PrefixNode) -> None:
        """Take a node and all that follows it out of the tree, whoever has its place there."""
        parent = node.parent
        assert parent is not None
        below = [node]
        for one in below:
            below.extend(one.children.values())
        for one in reversed(below):
            self._remove(one)
        self.settle(parent)

    def _is_of_use(self, leaf: PrefixNode) -> bool:
        """Whether a row could start at the end of a leaf."""
        if self._saved is not None and leaf.checkpoint_id is None:
            return False
        return self._windows.has_own(leaf)

    def _evict(self, leaf: PrefixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        self.num_evicted_checkpoints += leaf.checkpoint_id is not None
        self._remove(leaf)
        self.settle(parent)

    def _remove(self, node: PrefixNode) -> None:
        """Take a node without children out of the tree."""
        parent = node.parent
        assert parent is not None
        # A chain is used as a whole: its earlier blocks are as fresh as what followed them.
        parent.last_used = max(parent.last_used, node.last_used)
        del parent.children[node.key]
        node.alive = False
        for group, block_id in enumerate(node.block_ids):
            if block_id != NO_BLOCK:
                self._pools[group].forget(block_id)
                self._windows.remove(node, group)
        if self._saved is not None:
            self._saved.drop(node)


def descend(node: PrefixNode, token_ids: Sequence[int], depth: int) -> PrefixNode:
    """The last node below ``node``, at most ``depth`` blocks from the root, whose path agrees with the tokens."""
    while (at := node.depth) < depth:
        child = node.children.get(tuple(token_ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]))
        if child is None:
            break
        node = child
    return node
