"""Which tokens of a step belong to which row; an argument of every op that looks across tokens.

Legend: T tokens of all rows, R rows. Rows are in plan order: single-token rows first, then those with drafts, then
chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
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
    num_verifies: int = 0
    """Rows behind the single ones that feed the last token of an answer and drafts behind it. Recurrent states are
    advanced by that token alone; the drafts go to the rows' trails."""
    recalls: Mapping[int, int] = field(default_factory=dict)
    """Row of the step -> how many drafts of its last step, which lie in its trail, its state takes in first."""
    recall_R: Tensor | None = None
    """int64 [R], the same on the device; None: nobody recalls anything."""

    @property
    def num_rows(self) -> int:
        """Rows in the step."""
        return len(self.num_new)

    @property
    def verifying(self) -> range:
        """The rows of the step that feed drafts."""
        return range(self.num_single, self.num_single + self.num_verifies)

    def side_by_side(self, count: int) -> slice | None:
        """The first ``count`` rows of the step as a slice of per-row state, or None when they do not lie in order."""
        first = self.rows[0]
        return slice(first, first + count) if self.rows[:count] == list(range(first, first + count)) else None


def unrelated(num_exact: int, device: torch.device) -> Rows:
    """Tokens of no row, for ops that look at each by itself; the first ``num_exact`` take the exact way."""
    # Never read, and empty: filling them would be a launch in each pass that a GPU replays.
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    return Rows([], [], [], nothing, nothing, nothing, 0, 0, num_exact)


def recall_tensor(recalls: Mapping[int, int], num_rows: int, device: torch.device) -> Tensor:
    """What ``Rows.recall_R`` is for these ``Rows.recalls``."""
    return torch.tensor([recalls.get(i, 0) for i in range(num_rows)], dtype=torch.int64).to(device)


def refill_recalls(rows: Rows, recalls: Mapping[int, int]) -> None:
    """Write what another step recalls into rows that have ``recall_R``."""
    assert rows.recall_R is not None, "made without room for recalls"
    if rows.recalls or recalls:
        rows.recall_R.copy_(recall_tensor(recalls, rows.num_rows, rows.recall_R.device))
    rows.recalls = recalls
