"""One cache group's blocks: how many rows hold each, and which the prompt cache remembers. Integers only.

Refuses to know what is in a block. Next: ``block_table.py`` for the blocks of one row, ``prefix_index.py`` for what is
remembered, ``scheduler.py`` for when blocks are taken and given back.
"""

from __future__ import annotations

from collections.abc import Iterable

from troth.contracts.names import BlockId


class BlockPool:
    """Blocks 0 .. num_blocks - 1, each in exactly one of three places.

    | a block is | when | handed out again |
    |---|---|---|
    | used | rows hold references to it | when they have dropped them |
    | cached | no row does, the prefix index lists it | when the index forgets it |
    | free | neither | at once; the one freed last comes first, because its memory is the warmest |

    ``num_free + num_used + num_cached == num_blocks`` always.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_cached = 0
        """Blocks that only the prefix index holds."""
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._refs = [0] * num_blocks
        self._listed = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def free_ids(self) -> list[BlockId]:
        """The blocks nobody holds."""
        return list(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that rows hold."""
        return self.num_blocks - len(self._free) - self.num_cached

    def take(self, count: int) -> list[BlockId] | None:
        """Hand out ``count`` free blocks with one reference each, or None (and nothing taken) when there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block_id in taken:
            self._refs[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add one reference to each block; none may be free."""
        refs = self._refs
        for block_id in block_ids:
            if refs[block_id] == 0:
                assert self._listed[block_id], f"block {block_id} is free and cannot be shared"
                self.num_cached -= 1
            refs[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Drop one reference from each block."""
        for block_id in block_ids:
            refs = self._refs[block_id] - 1
            assert refs >= 0, f"block {block_id} was released more often than taken"
            self._refs[block_id] = refs
            if refs == 0:
                if self._listed[block_id]:
                    self.num_cached += 1
                else:
                    self._free.append(block_id)

    def remember(self, block_id: BlockId) -> None:
        """The prefix index lists a block from now on; rows hold it, and nothing lists it yet."""
        assert self._refs[block_id] > 0, f"block {block_id} is not held and has nothing to remember"
        assert not self._listed[block_id], f"block {block_id} is listed twice"
        self._listed[block_id] = 1

    def forget(self, block_id: BlockId) -> None:
        """The prefix index lists a block no more."""
        assert self._listed[block_id], f"block {block_id} is not listed"
        self._listed[block_id] = 0
        if self._refs[block_id] == 0:
            self.num_cached -= 1
            self._free.append(block_id)

    def references(self, block_id: BlockId) -> int:
        """How many references rows hold."""
        return self._refs[block_id]

    def is_listed(self, block_id: BlockId) -> bool:
        """Whether the prefix index lists the block."""
        return bool(self._listed[block_id])
