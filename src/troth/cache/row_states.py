"""What the recurrent states and trails of some rows were, to go back to them.

For who computes one step several times (``run/proved.py``): keys and values are only written again, a state would be
advanced each time. Refuses to know why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.names import Row


class RowStates:
    """Copies of the rows' states and trails, as they are when it is made; none where the model keeps no state.

    Args:
        cache: of the model; None: what is computed advances no state.
        rows: of the persistent batch.
    """

    def __init__(self, cache: CacheStorage | None, rows: Sequence[Row]) -> None:
        by_layer = () if cache is None else chain(cache.states.values(), cache.trails.values())
        live = chain.from_iterable(by_layer)
        self._rows = list(rows)
        self._copies = [(tensor, tensor[self._rows]) for tensor in live]

    def put_back(self) -> None:
        """Make them what they were."""
        for live, copy in self._copies:
            live[self._rows] = copy

    def are_back(self, same: Callable[[Tensor, Tensor], bool]) -> bool:
        """Whether they are what they were, as ``same`` judges."""
        return all(same(live[self._rows], copy) for live, copy in self._copies)
