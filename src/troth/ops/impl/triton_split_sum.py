"""The sum of a product whose inputs several programs share: each leaves its part, the last to come adds all of them up.

Parts are added in order, whoever comes last: a result is the same bits in every run. Refuses to know what is multiplied
(``triton_product.py``, ``triton_groups_product.py``).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_ARRIVALS: Final = WeakTensorKeyDictionary()
"""Matrix -> int32 [tiles], zeros between products: how many programs have left their part of a tile.

Each matrix has its own: engines beside each other must not count together.
"""


def arrivals_of(weight: Tensor, tiles: int) -> Tensor:
    """int32 [tiles], zeros: the places where programs that share a tile of this matrix's products report."""
    if weight not in _ARRIVALS:
        _ARRIVALS[weight] = torch.zeros(tiles, dtype=torch.int32, device=weight.device)
    arrivals: Tensor = _ARRIVALS[weight]
    return arrivals


@triton.jit
def sum_of_parts(
    part: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    split: tl.tensor,
    area: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Leave one part of a tile's sum; the program that comes last gets the whole one.

    Args:
        part: float32, what this program found.
        parts: float32, room for all parts of the result.
        arrivals: the tile's place, 0 before and after.
        split: which part it is.
        area: int64, numbers of one part of the whole result.
        at: as ``part``, where its numbers belong in the result.
        inside: as ``part``, whether they do.

    Returns:
        The sum, where this program came last; whether it did.
    """
    tl.store(parts + split * area + at, part, mask=inside)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
    is_last = arrived == SPLITS - 1
    total = part
    if is_last:
        tl.debug_barrier()
        total = tl.zeros_like(part)
        for other in tl.static_range(SPLITS):
            # The first cache of this processor may hold what was there before.
            total += tl.load(parts + other * area + at, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(arrivals, 0)
    return total, is_last
