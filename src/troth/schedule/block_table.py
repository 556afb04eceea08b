"""The blocks of one row in one cache group, in order of position.

index           0      1      2      3
tokens        0..15  16..31 32..47 48..63
block id       -1      -1     7      3        window groups give early blocks back; their entries become NO_BLOCK
              `--dropped--'  `--live--'
"""

from __future__ import annotations

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS, NO_BLOCK, BlockId
from troth.schedule.block_pool import BlockPool


class BlockTable:
    """Owns one reference to each live block of one row and group."""

    __slots__ = ("_num_dropped", "_pool", "_spec", "block_ids")

    def __init__(self, spec: AttentionSpec, pool: BlockPool) -> None:
        self._spec = spec
        self._pool = pool
        self._num_dropped = 0
        self.block_ids: list[BlockId] = []

    @property
    def num_live(self) -> int:
        """Blocks this table holds references to."""
        return len(self.block_ids) - self._num_dropped

    def adopt(self, block_ids: list[BlockId]) -> None:
        """Start from a prefix hit: share its blocks, NO_BLOCK first where the window has passed. The table is empty."""
        assert not self.block_ids, "a hit can only start a table"
        self._num_dropped = block_ids.count(NO_BLOCK)
        self._pool.share(block_ids[self._num_dropped :])
        self.block_ids = block_ids

    def start_at(self, position: int) -> None:
        """As if the row came to ``position`` without ever holding the blocks that no query from there on reads."""
        self.drop_before(position)
        missing = self._spec.first_needed(position) - len(self.block_ids)
        if missing > 0:
            self.block_ids += [NO_BLOCK] * missing
            self._num_dropped = len(self.block_ids)

    def swap(self, index: int, block_id: BlockId) -> None:
        """Use another block with the same content instead; the one before is given back."""
        self._pool.share((block_id,))
        self._pool.release((self.block_ids[index],))
        self.block_ids[index] = block_id

    def missing(self, num_tokens: int) -> int:
        """How many blocks must be added before ``num_tokens`` tokens have a slot each."""
        return max(0, -(-num_tokens // BLOCK_TOKENS) - len(self.block_ids))

    def grow(self, num_tokens: int) -> list[BlockId] | None:
        """Take what is missing for ``num_tokens``; the new blocks, or None (and no change) when the pool has too
        few.
        """
        taken = self._pool.take(self.missing(num_tokens))
        if taken:
            self.block_ids.extend(taken)
        return taken

    def drop_before(self, position: int) -> None:
        """Give back the blocks that no query at ``position`` or later reads."""
        first = min(self._spec.first_needed(position), len(self.block_ids))
        if first <= self._num_dropped:
            return
        old = self.block_ids[self._num_dropped : first]
        self._pool.release(old)
        self.block_ids[self._num_dropped : first] = [NO_BLOCK] * len(old)
        self._num_dropped = first

    def clear(self) -> None:
        """Give every live block back."""
        self._pool.release(self.block_ids[self._num_dropped :])
        self.block_ids = []
        self._num_dropped = 0
