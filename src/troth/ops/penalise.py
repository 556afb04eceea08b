"""Repetition, presence and frequency penalties and logit bias, on the few logits they touch.

Legend: R rows, V vocabulary, N touched (row, token) pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op


@dataclass(slots=True)
class Touched:
    """Which logits to change and how; each (row, token) pair at most once."""

    row_N: Tensor
    """int64."""
    token_N: Tensor
    """int64."""
    repetition_N: Tensor
    """float32: divides positive logits, multiplies negative ones; 1 is off."""
    subtract_N: Tensor
    """float32: presence penalty + frequency penalty * count - bias."""


_SIZES: Final = ((1, 5, 1), (3, 64, 40), (4, 33, 132))
"""Rows, vocabulary, touched pairs: one, some and all."""
_TIMED_SIZES: Final = ((1, 151936, 500), (8, 151936, 4000))


def _grid() -> Iterator[Case]:
    for size in (*_SIZES, *_TIMED_SIZES):
        yield Case(sizes(*size), partial(_arguments, *size), timed=size in _TIMED_SIZES)


@op(tolerances={torch.float32: Tolerance(1e-6, 1e-6, "one multiplication and one subtraction")}, grid=_grid)
def penalise(logits_RV: Tensor, touched: Touched) -> None:
    """Change ``logits_RV`` (float32 [R, V]) in place."""
    scores_N = logits_RV[touched.row_N, touched.token_N]
    scaled_N = torch.where(scores_N > 0, scores_N / touched.repetition_N, scores_N * touched.repetition_N)
    logits_RV[touched.row_N, touched.token_N] = scaled_N - touched.subtract_N


def _arguments(num_rows: int, vocab_size: int, num_touched: int, inputs: Inputs) -> tuple[Any, ...]:
    pair_N = torch.tensor(inputs.order(num_rows * vocab_size)[:num_touched], device=inputs.device)
    touched = Touched(
        row_N=pair_N // vocab_size,
        token_N=pair_N % vocab_size,
        repetition_N=inputs.uniform(0.5, 2.0, num_touched),
        subtract_N=inputs.uniform(-3.0, 3.0, num_touched),
    )
    return 5 * inputs.normal(num_rows, vocab_size, dtype=torch.float32), touched
