"""Something computed in the ordinary way, kept to run again, and proved to do the same again.

What a recording or a capture leaves out would go unnoticed: its results would stand as they were left. So they are
spoilt, recurrent states put back (``cache/row_states.py``), it runs again, and results and states must come out as from
the ordinary computing. Refuses to know what is computed (``recorded.py``, ``graphs.py``, ``recorded_passes.py``) and
how it is kept (``capture.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from troth.cache.row_states import RowStates
from troth.cache.storage import CacheStorage
from troth.contracts.names import Row
from troth.run.capture import Capture, Computed, near

Same = Callable[[Computed, Computed], bool]


@dataclass(frozen=True, slots=True)
class Kept:
    """What runs again as it did."""

    run: Callable[[], None]
    computed: Computed
    """Its results, overwritten each time."""


def all_near(again: Computed, ordinary: Computed) -> bool:
    """Whether every result is the same, as ``near`` judges."""
    return all(map(near, again, ordinary))


def proved(
    compute: Callable[[], Computed],
    capture: Capture,
    cache: CacheStorage | None = None,
    rows: Sequence[Row] = (),
    same: Same = all_near,
) -> tuple[Computed, Kept | None]:
    """Compute something, keep it, and prove what is kept.

    Args:
        compute: reads and writes the same tensors each time; but for states, what it writes it may write again. Its
            results may be overwritten by what is kept.
        capture: keeps it.
        cache: whose states and trails it advances; None: none.
        rows: those of these rows.
        same: whether results (the first) are those of the ordinary computing.

    Returns:
        Results of the ordinary computing, and what was kept; None: it does something else when it runs again, and
        states, keys and values are once more what the ordinary computing makes of them.
    """
    before = RowStates(cache, rows)
    ordinary = tuple(result.clone() for result in compute())
    after = RowStates(cache, rows)
    before.put_back()
    run, again = capture(compute)
    for result in again:
        result.fill_(torch.nan)
    before.put_back()
    run()
    if same(again, ordinary) and after.are_back(near):
        return ordinary, Kept(run, again)
    before.put_back()
    return compute(), None
