"""What a decode step reads anew each time, in one piece of memory, so that it can be staged and copied at once.

Refuses to know where the numbers come from (``batch.py``). Legend: R rows, B blocks per table, G attention groups.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from troth.ops.rows import Rows


class StepInputs:
    """The numbers of a step in which each of R rows feeds one token. Owns their memory; every array is a view of it.

    Args:
        num_rows: R.
        width: B.
        num_groups: G.
    """

    def __init__(self, num_rows: int, width: int, num_groups: int) -> None:
        wide = (3 + num_groups) * num_rows
        narrow = (1 + num_groups * width) * num_rows
        self.memory = torch.zeros(8 * wide + 4 * narrow, dtype=torch.uint8)
        """All arrays, one behind the other: int64 first, so that all are aligned."""
        held = self.memory.numpy()
        wide_XR = held[: 8 * wide].view(np.int64).reshape(3 + num_groups, num_rows)
        narrow_N = held[8 * wide :].view(np.int32)
        self.token_id_R: NDArray[np.int64] = wide_XR[0]
        """May be ON_DEVICE where it is staged; known where it is read."""
        self.position_R: NDArray[np.int64] = wide_XR[1]
        """Of each token in its own request."""
        self.row_R: NDArray[np.int64] = wide_XR[2]
        """Places of the rows in the persistent batch."""
        self.slot_GR: NDArray[np.int64] = wide_XR[3:]
        """Where their keys and values go."""
        self.context_len_R: NDArray[np.int32] = narrow_N[:num_rows]
        """Tokens of each row, this one included."""
        self.block_table_GRB: NDArray[np.int32] = narrow_N[num_rows:].reshape(num_groups, num_rows, width)
        """Block ids by position / 16."""

    def rows(self) -> Rows:
        """The rows of the step over these arrays; starts and places on the host are the caller's to set."""
        num_rows = len(self.row_R)
        return Rows(
            num_new=[1] * num_rows,
            starts=[0] * num_rows,
            rows=[0] * num_rows,
            query_start_R1=torch.arange(num_rows + 1, dtype=torch.int32),
            context_len_R=torch.from_numpy(self.context_len_R),
            row_R=torch.from_numpy(self.row_R),
            max_new=1,
            num_single=num_rows,
            num_exact=num_rows,
            recall_R=torch.zeros(num_rows, dtype=torch.int64),
        )
