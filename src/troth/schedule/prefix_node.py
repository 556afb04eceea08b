"""One remembered block of tokens, and the order in which what hangs on nodes is given up.

Refuses to know when anything is given up: ``prefix_tree.py`` decides, and with ``prefix_index.py`` alone changes nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from troth.contracts.names import BlockId, CheckpointId

_SLACK = 64
"""Outdated entries among leaves that are not worth a sweep."""

TokenBlock = tuple[int, ...]
"""BLOCK_TOKENS token ids: what a node is called among the children of its parent."""


class PrefixNode:
    """A chain of whole blocks from the root of a namespace, and what is held of its last one.

    Chains are compared token by token along the path, so two different ones can never be taken for each other.
    """

    __slots__ = (
        "alive",
        "block_ids",
        "checkpoint_id",
        "children",
        "depth",
        "is_restored",
        "key",
        "last_used",
        "leases",
        "namespace",
        "parent",
        "pins",
    )

    def __init__(
        self, parent: PrefixNode | None, key: TokenBlock, namespace: str, block_ids: tuple[BlockId, ...]
    ) -> None:
        self.parent = parent
        """None: the root of a namespace, at no tokens."""
        self.key = key
        self.namespace = namespace
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Blocks from the root to the end of this node."""
        self.block_ids = block_ids
        """By attention group; NO_BLOCK where a sliding-window group has dropped it."""
        self.checkpoint_id: CheckpointId | None = None
        """Where the recurrent state at the node's end is saved."""
        self.children: dict[TokenBlock, PrefixNode] = {}
        self.leases = 0
        """Rows whose place this is; with a child or a lease a node stays."""
        self.pins = 0
        """How many of the leases are pins, which keep the checkpoint too."""
        self.last_used = 0
        self.is_restored = False
        """Whether anything of it came from elsewhere than a step."""
        self.alive = True
        """False once the node is out of the index."""

    def set_block(self, group: int, block_id: BlockId) -> None:
        """Change the block of one group."""
        self.block_ids = (*self.block_ids[:group], block_id, *self.block_ids[group + 1 :])


class EvictionOrder:
    """Nodes that hold one kind of thing, in the order in which they should lose it.

    What lies where nobody has reason to come back to goes first, then what does (the ends of system prompts, turns and
    answers); within both, what was used longest ago.
    """

    def __init__(self) -> None:
        self._passing: OrderedDict[PrefixNode, None] = OrderedDict()
        self._kept: OrderedDict[PrefixNode, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._passing) + len(self._kept)

    def __iter__(self) -> Iterator[PrefixNode]:
        return chain(self._passing, self._kept)

    def add(self, node: PrefixNode) -> None:
        """List a node that nobody is known to come back to."""
        self._passing[node] = None

    def keep(self, node: PrefixNode) -> None:
        """List a node, or refresh it, as one to come back to."""
        self._passing.pop(node, None)
        self._kept[node] = None
        self._kept.move_to_end(node)

    def is_kept(self, node: PrefixNode) -> bool:
        """Whether the node is one to come back to."""
        return node in self._kept

    def remove(self, node: PrefixNode) -> None:
        """The node lost what it held."""
        self._passing.pop(node, None)
        self._kept.pop(node, None)


class LeafOrder:
    """Leaves without a lease, those used longest ago first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, PrefixNode]] = []
        """(last used, number, node); an entry whose node has moved on since is passed over."""
        self._num_added = 0
        self._sweep_at = _SLACK

    def add(self, leaf: PrefixNode) -> None:
        """List a leaf at the time it was last used."""
        self._num_added += 1
        heappush(self._heap, (leaf.last_used, self._num_added, leaf))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if _is_current(entry)]
            heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _SLACK

    def pop(self) -> PrefixNode | None:
        """Take the first out; None when there is none."""
        while self._heap:
            entry = heappop(self._heap)
            if _is_current(entry):
                return entry[2]
        return None

    def nodes(self) -> set[PrefixNode]:
        """All of them. For checks."""
        return {entry[2] for entry in self._heap if _is_current(entry)}


def _is_current(entry: tuple[int, int, PrefixNode]) -> bool:
    last_used, _, node = entry
    return node.alive and not node.leases and not node.children and node.last_used == last_used
