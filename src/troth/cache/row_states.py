"""What the recurrent states and trails of some rows were, to go back to them.

For who computes one step several times (``run/recorded.py``, ``run/graphs.py``): keys and values are only written
again, a state would be advanced each time. Refuses to know why.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.names import Row


class RowStates:
    """Copies of the rows' states and trails, as they are when it is made; none where the model keeps no state.

    Args:
        cache: of the model.
        rows: of the persistent batch.
    """

    def __init__(self, cache: CacheStorage, rows: Sequence[Row]) -> None:
        live = chain.from_iterable(chain(cache.states.values(), cache.trails.values()))
        self._rows = list(rows)
        self._copies = [(tensor, tensor[self._rows]) for tensor in live]

    def put_back(self) -> None:
        """Make them what they were."""
        for live, copy in self._copies:
            live[self._rows] = copy

    def are_back(self, tolerance: float = 0.0) -> bool:
        """Whether they are, bit by bit (NaN is NaN) or up to a difference, absolute and relative, what they were."""
        if tolerance:
            return all(
                torch.allclose(live[self._rows], copy, rtol=tolerance, atol=tolerance, equal_nan=True)
                for live, copy in self._copies
            )
        return all(_same(live[self._rows], copy) for live, copy in self._copies)


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))
