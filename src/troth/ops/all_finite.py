"""Whether a row of logits can be sampled from. Legend: R rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op

_SIZES: Final = ((1, 1), (3, 50), (8, 1031))
_TIMED_SIZES: Final = ((1, 49152), (8, 151936))


def _grid() -> Iterator[Case]:
    for size in (*_SIZES, *_TIMED_SIZES):
        yield Case(sizes(*size), partial(_arguments, *size), timed=size in _TIMED_SIZES)


@op(tolerances={torch.bool: Tolerance(0.0, 0.0, "a row is finite or not")}, grid=_grid)
def all_finite(logits_RV: Tensor) -> Tensor:
    """Rows without nan and infinities.

    Args:
        logits_RV: float32 [R, V].

    Returns:
        bool [R].
    """
    return logits_RV.isfinite().all(dim=-1)


def _arguments(num_rows: int, vocab_size: int, inputs: Inputs) -> tuple[Any, ...]:
    logits_RV = inputs.normal(num_rows, vocab_size, dtype=torch.float32)
    # Odd rows are not finite, each for another reason and at another place.
    for r in range(1, num_rows, 2):
        logits_RV[r, -(r % vocab_size) - 1] = (torch.nan, torch.inf, -torch.inf)[r // 2 % 3]
    return (logits_RV,)
