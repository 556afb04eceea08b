"""One cache group's blocks: who holds how many references to each. Integers only; the bytes are ``cache/``'s.

Next: ``block_table.py`` for the blocks of one row, ``scheduler.py`` for when they are taken and given back.
"""

from __future__ import annotations

from collections.abc import Iterable

from troth.contracts.names import BlockId


class BlockPool:
    """Reference-counted blocks 0 .. num_blocks - 1.

    A block is *free* at zero references and *used* otherwise; ``num_free + num_used == num_blocks`` always. The block
    freed last is handed out first, because its memory is the warmest.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[BlockId] | None:
        """Hand out ``count`` free blocks with one reference each, or None (and nothing taken) when there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._refs[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference to each block; all must be used."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is free and cannot be shared"
            self._refs[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Drop one reference from each block."""
        for block_id in block_ids:
            refs = self._refs[block_id] - 1
            assert refs >= 0, f"block {block_id} was released more often than taken"
            self._refs[block_id] = refs
            if refs == 0:
                self._free.append(block_id)

    def references(self, block_id: BlockId) -> int:
        """How many holders the block has."""
        return self._refs[block_id]
