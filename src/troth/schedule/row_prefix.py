"""One row's dealings with the prompt cache: what it publishes as its blocks fill, where it saves its recurrent state.

Refuses to know budgets and steps. Used by ``scheduler.py``; what is published lives in ``prefix_index.py``.

    prompt   [ system, tools | turn | turn ... | generation prompt ]   answer ...
    ends                     ^                 ^                          where others may come back: kept longest
    interval         ^               ^                ^                   for what agrees only in part
    tail                                                            ^     the last block edge of the answer so far
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final

from troth.contracts.names import BLOCK_TOKENS, BlockId, CheckpointId
from troth.contracts.request import Request
from troth.schedule.block_table import BlockTable
from troth.schedule.prefix_index import PrefixIndex
from troth.schedule.prefix_match import PrefixPlace
from troth.schedule.prefix_node import PrefixNode

ANSWER_BLOCKS: Final = 8
"""Blocks of an answer are published so many at a time: hardly anybody shares them before it ends, and one at a time
they cost some 12 us each, of which a step of 256 rows completes 16 on average.
"""
TAIL_TOKENS: Final = 64
"""Drafts of an answer stop before a block edge where its last checkpoint is so far behind: one is taken where a step
ends, and steps with drafts hardly ever end at an edge. Some 2 % of them are cut, and a next turn computes so many
tokens again at most."""


class RowPrefix:
    """Owns the row's place in the index and the checkpoints it has not attached yet.

    Args:
        index: the prompt cache.
        place: where the row starts; its lease is given back by ``leave`` or ``discard``.
        request: says where others may come back.
        interval_tokens: distance of further checkpoints.
    """

    __slots__ = (
        "_ends",
        "_index",
        "_interval",
        "_num_kept",
        "_num_prompt",
        "_num_saved",
        "_pending",
        "_place",
        "_tail",
    )

    def __init__(self, index: PrefixIndex, place: PrefixPlace, request: Request, interval_tokens: int) -> None:
        self._index = index
        self._place = place
        self._ends = ends_of(request) if index.keeps_ends else []
        self._interval = interval_tokens
        self._num_prompt = len(request.prompt_ids)
        self._num_kept = bisect_right(self._ends, place.node.depth * BLOCK_TOKENS)
        self._num_saved = place.node.depth * BLOCK_TOKENS
        """Tokens behind which a state was saved last, or would have been with more room."""
        self._pending: deque[tuple[int, CheckpointId]] = deque()
        self._tail: PrefixNode | None = None
        """Where the row's own latest checkpoint hangs, if only the row knows of it."""

    @property
    def node(self) -> PrefixNode:
        """The row's place in the index; read only."""
        return self._place.node

    @property
    def num_pending(self) -> int:
        """Checkpoints on their way."""
        return len(self._pending)

    @property
    def is_open(self) -> bool:
        """Whether there is still a chain to publish to."""
        return self._place.node.alive

    @property
    def next_publish(self) -> int:
        """Number of tokens from which on it is worth publishing."""
        depth = self._place.node.depth
        in_answer = depth * BLOCK_TOKENS >= self._num_prompt and self._index.checkpoints is None
        return (depth + (ANSWER_BLOCKS if in_answer else 1)) * BLOCK_TOKENS

    def has_more(self, num_tokens: int) -> bool:
        """Whether ``num_tokens`` committed tokens complete a block that is not published."""
        return num_tokens >= (self._place.node.depth + 1) * BLOCK_TOKENS

    def next_checkpoint(self, position: int, num_tokens: int) -> int | None:
        """The first position after ``position``, inside a prompt of ``num_tokens``, where a state is worth saving."""
        wanted = [(position // self._interval + 1) * self._interval]
        number = bisect_right(self._ends, position)
        wanted += self._ends[number : number + 1]
        # An answer too short to reach the next block edge leaves its checkpoint at the prompt's last one.
        last = (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if last > position:
            wanted.append(last)
        at = min(wanted)
        return at if at < num_tokens else None

    def misses_state(self, position: int) -> bool:
        """Whether the state after ``position`` tokens of an answer, a block edge, is worth a step of its own."""
        return self.is_open and position - self._num_saved >= TAIL_TOKENS

    def save(self, position: int) -> CheckpointId | None:
        """A checkpoint for the state after ``position`` tokens, a block edge; None when there is no room.

        It is attached when those tokens are published, and given back if they never are.
        """
        if not self.is_open:
            return None
        self._num_saved = position
        checkpoint_id = self._index.take_checkpoint()
        if checkpoint_id is not None:
            self._pending.append((position, checkpoint_id))
        return checkpoint_id

    def publish(
        self, token_ids: Sequence[int], num_tokens: int, tables: Sequence[BlockTable]
    ) -> list[tuple[int, int, BlockId]]:
        """Offer what ``num_tokens`` committed tokens complete; table entries that changed, as PrefixIndex.extend."""
        swaps = self._index.extend(self._place, token_ids, num_tokens, tables)
        while self._pending and self._pending[0][0] <= num_tokens:
            self._attach(*self._pending.popleft())
        while self._num_kept < len(self._ends) and self._ends[self._num_kept] <= num_tokens:
            self._index.keep_end(self._place, self._ends[self._num_kept])
            self._num_kept += 1
        return swaps

    def leave(self) -> None:
        """The row ends or is preempted: what it published stays."""
        self._drop_pending()
        if self._tail is not None:
            self._index.keep(self._tail)
        if self._index.departures is not None:
            ends = {at // BLOCK_TOKENS for at in self._ends} | ({self._tail.depth} if self._tail is not None else set())
            self._index.note_departure(self._place, sorted(ends))
        self._index.leave(self._place)

    def discard(self) -> None:
        """The row failed: nothing it computed stays."""
        self._drop_pending()
        self._index.discard(self._place)

    def _attach(self, position: int, checkpoint_id: CheckpointId) -> None:
        number = bisect_right(self._ends, position)
        is_end = number > 0 and self._ends[number - 1] == position
        node = self._index.attach(self._place, position, checkpoint_id, keep=is_end)
        if node is None or is_end or position % self._interval == 0:
            return
        if self._tail is not None:
            self._index.supersede(self._tail)
        self._tail = node

    def _drop_pending(self) -> None:
        for _, checkpoint_id in self._pending:
            self._index.release_checkpoint(checkpoint_id)
        self._pending.clear()


def ends_of(request: Request) -> list[int]:
    """Block edges of a prompt where another request may come back, ascending: what the request names, and its own end.

    A conversation comes back before its generation prompt; a plain prompt, asked again, before its last token.
    """
    last = len(request.prompt_ids) - 1
    boundary = last if request.boundary is None else request.boundary
    edges = {min(at, last) // BLOCK_TOKENS * BLOCK_TOKENS for at in (*request.checkpoint_positions, boundary)}
    return sorted(edge for edge in edges if edge > 0)
