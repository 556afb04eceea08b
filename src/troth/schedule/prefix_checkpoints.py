"""The recurrent layers' share of the prefix index: which nodes have a checkpoint, which lose theirs first.

Refuses to know the tree's other needs (``prefix_tree.py``). The places themselves are ``checkpoint_pool.py``'s.
"""

from __future__ import annotations

from troth.contracts.names import CheckpointId
from troth.schedule.checkpoint_pool import CheckpointPool
from troth.schedule.prefix_node import EvictionOrder, PrefixNode


class PrefixCheckpoints:
    """The checkpoints that hang on nodes.

    Args:
        pool: their places.
        num_bytes: of one.
    """

    def __init__(self, pool: CheckpointPool, num_bytes: int) -> None:
        self.pool = pool
        self._num_bytes = num_bytes
        self._order = EvictionOrder()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def total_bytes(self) -> int:
        """Bytes of all that hang on nodes."""
        return len(self._order) * self._num_bytes

    def attach(self, node: PrefixNode, checkpoint_id: CheckpointId, *, keep: bool) -> None:
        """A node, which had none, has the state at its end from now on; ``keep``: one to come back to."""
        node.checkpoint_id = checkpoint_id
        if keep:
            self._order.keep(node)
        else:
            self._order.add(node)

    def touch(self, node: PrefixNode) -> None:
        """Somebody came back to a node, or is likely to."""
        if node.checkpoint_id is not None:
            self._order.keep(node)

    def is_passing(self, node: PrefixNode) -> bool:
        """Whether a node has a checkpoint that nobody is known to come back to."""
        return node.checkpoint_id is not None and not self._order.is_kept(node)

    def drop(self, node: PrefixNode) -> None:
        """A node loses its checkpoint, if it has one."""
        if node.checkpoint_id is not None:
            self.pool.release(node.checkpoint_id)
            node.checkpoint_id = None
            self._order.remove(node)

    def least_wanted(self) -> PrefixNode | None:
        """The node whose checkpoint makes room for another; pinned ones never do."""
        return next((node for node in self._order if not node.pins), None)
