"""Repetition, presence and frequency penalties and logit bias, on the few logits they touch.

Legend: R rows, V vocabulary, N touched (row, token) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


@op(tolerances={torch.float32: Tolerance(1e-6, 1e-6, "one multiplication and one subtraction")})
def penalise(logits_RV: Tensor, touched: Touched) -> None:
    """Change ``logits_RV`` (float32 [R, V]) in place."""
    scores_N = logits_RV[touched.row_N, touched.token_N]
    scaled_N = torch.where(scores_N > 0, scores_N / touched.repetition_N, scores_N * touched.repetition_N)
    logits_RV[touched.row_N, touched.token_N] = scaled_N - touched.subtract_N
