"""What a captured step is refilled with: the integers of rows that continue answers, in one tensor on the device.

One copy from pinned memory brings all of a step's numbers, and rows and tokens are padded, so that a capture serves
every plan that fits. Refuses to know block tables (``device_batch.py``) and captures (``graphs.py``).
Legend: R rows, T tokens, padding included.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troth.contracts.plan import StepPlan

ALIGNMENT: Final = 16
"""Numbers of a step begin at multiples of this many: kernels are compiled for aligned addresses, and once."""


class AnswerInputs:
    """What a step whose rows all continue answers is refilled with, for fixed numbers of rows and tokens.

    Rows lie one behind the other, each with as many tokens as it has; those behind the last one are padding. Where rows
    feed one token, a padding row has one, too; else it has none, and the tokens left over are nobody's.

    Args:
        num_rows: R, padding included.
        num_tokens: T, padding included; as many as rows where each feeds one.
        width: most tokens of a row.
        pad_row: the row of the persistent batch that padding has.
        device: where the step runs.
    """

    def __init__(self, num_rows: int, num_tokens: int, width: int, pad_row: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.num_tokens = num_tokens
        self.width = width
        sizes = [*[aligned(num_tokens)] * 3, *[aligned(num_rows)] * 3, num_rows + 1]
        self._empty = np.zeros(sum(sizes), dtype=np.int64)
        self._parts = np.cumsum(sizes)[:-1]
        for part in (self._split(self._empty)[i] for i in (2, 3)):
            part[:] = pad_row
        if width == 1:
            self._split(self._empty)[6][:] = range(num_rows + 1)
        self._held = torch.from_numpy(self._empty).to(device, copy=True)
        parts = [self._held[end - size : end] for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True)]
        self.ids_T, self.positions_T, self.row_T = (part[:num_tokens] for part in parts[:3])
        """int64 [T]: token ids (or ON_DEVICE), positions, rows."""
        self.row_R, self.context_R, self.recall_R = (part[:num_rows] for part in parts[3:6])
        """int64 [R]: rows, tokens computed with this step, drafts to recall."""
        self.begin_R1 = parts[6]
        """int64 [R + 1]: where each row's tokens begin."""
        self.num_new = [1 if width == 1 else 0] * num_rows
        self.starts = [0] * num_rows
        """Both as the host last filled them; providers that look at them cannot be replayed."""

    def filled(self, plan: StepPlan) -> NDArray[np.int64]:
        """All numbers of a plan, as they lie on the device."""
        whole = self._empty.copy()
        ids_T, positions_T, row_T, row_R, context_R, recall_R, begin_R1 = self._split(whole)
        count, num_tokens = len(plan.rows), plan.num_tokens
        rows, starts, num_new = (np.asarray(values) for values in (plan.rows, plan.starts, plan.num_new))
        ids_T[:num_tokens], row_R[:count], context_R[:count] = plan.token_ids, rows, starts + num_new
        if self.width == 1:
            positions_T[:count], row_T[:count] = starts, rows
        else:
            np.cumsum(num_new, out=begin_R1[1 : count + 1])
            begin_R1[count + 1 :] = num_tokens
            positions_T[:num_tokens] = np.arange(num_tokens) + np.repeat(starts - begin_R1[:count], num_new)
            row_T[:num_tokens] = np.repeat(rows, num_new)
        recall_R[list(plan.recalls)] = list(plan.recalls.values())
        self.num_new[:] = [*plan.num_new, *[1 if self.width == 1 else 0] * (self.num_rows - count)]
        self.starts[:] = [*plan.starts, *[0] * (self.num_rows - count)]
        return whole

    def refill(self, pinned: Tensor) -> None:
        """Send what ``filled`` made; the host does not wait."""
        self._held.copy_(pinned, non_blocking=True)

    def _split(self, whole: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        return np.split(whole, self._parts)


def aligned(count: int) -> int:
    """The least multiple of ALIGNMENT that is not below ``count``."""
    return -(-count // ALIGNMENT) * ALIGNMENT
