"""Which tokens of a step belong to which row; an argument of every op that looks across tokens.

Legend: T tokens of all rows, R rows. Rows are in plan order: single-token rows first, then chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Rows:
    """Which tokens belong to which row. Shared by every layer of a step."""

    num_new: list[int]
    """Tokens fed per row, on the host."""
    starts: list[int]
    """Tokens already computed per row, on the host."""
    rows: list[int]
    """Place of each row in the persistent batch, on the host."""
    query_start_R1: Tensor
    """int32 [R + 1]: row i owns tokens query_start[i] .. query_start[i + 1] - 1."""
    context_len_R: Tensor
    """int32 [R]: starts + num_new."""
    row_R: Tensor
    """int64 [R]: ``rows`` on the device, the index into per-row state."""
    max_new: int
    """Most tokens fed by one row."""
    num_single: int
    """Rows at the head of the batch that feed exactly one token."""
    num_exact: int
    """Tokens at the head of the batch that continue an answer; prompt tokens follow. Where a provider has a fast way
    and an exact one, these take the exact one, whatever their company: an answer must not depend on it.
    """

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return len(self.num_new)

    def side_by_side(self, count: int) -> slice | None:
        """The first ``count`` rows of the step as a slice of per-row state, or None when they do not lie in order."""
        first = self.rows[0]
        return slice(first, first + count) if self.rows[:count] == list(range(first, first + count)) else None
