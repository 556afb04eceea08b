"""The scheduler's view of the prompt cache: look up, publish, give back. Integers only.

The index owns one reference to each block it lists; a row that uses a hit owns its own. A block is free when nobody
holds a reference. Until the prompt cache lands, ``NoPrefixCache`` keeps the door open and always misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from troth.contracts.names import BlockId
from troth.contracts.request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest usable prefix: a whole number of blocks, never the whole prompt.

    ``block_ids[group][index]`` carries references that now belong to the caller; NO_BLOCK where a group no longer needs
    the block (before its window).
    """

    num_tokens: int = 0
    block_ids: tuple[tuple[BlockId, ...], ...] = field(default=())


MISS = PrefixHit()


class PrefixCache(Protocol):
    """What the scheduler asks of a prefix index."""

    @property
    def publishes(self) -> bool:
        """Whether published blocks are kept at all; false saves the work of completing them."""

    def lookup(self, request: Request, token_ids: Sequence[int]) -> PrefixHit:
        """Find the longest prefix of ``token_ids`` usable by this request and take references to its blocks."""

    def publish(self, request: Request, token_ids: Sequence[int], tables: Sequence[Sequence[BlockId]]) -> None:
        """Offer the whole blocks of ``token_ids``, all of them committed; ``tables[group]`` are the row's block tables.

        The index takes its own references; the caller keeps and later releases its own.
        """

    def reclaim(self, group: int, num_blocks: int) -> int:
        """Drop references until ``num_blocks`` more blocks of ``group`` are free; return how many became free."""


class NoPrefixCache:
    """A prefix cache that holds nothing."""

    publishes = False

    def lookup(self, request: Request, token_ids: Sequence[int]) -> PrefixHit:
        """Miss."""
        return MISS

    def publish(self, request: Request, token_ids: Sequence[int], tables: Sequence[Sequence[BlockId]]) -> None:
        """Keep nothing."""

    def reclaim(self, group: int, num_blocks: int) -> int:
        """Nothing to free."""
        return 0
