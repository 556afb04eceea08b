"""A linear layer: one packed weight, perhaps several of the artifact's stacked, and a bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from troth.ops.linear import LinearWeight, RawWeight, linear, pack
from troth.ops.rows import Rows


@dataclass(slots=True)
class Linear:
    """y = x W^T + b."""

    weight: LinearWeight
    bias_O: Tensor | None = None

    def __call__(self, x_TI: Tensor, rows: Rows) -> Tensor:
        """float [T, I] -> float [T, O]; ``rows`` tells which tokens continue an answer."""
        return linear(x_TI, self.weight, self.bias_O, rows.num_exact)


def stacked(
    weights: Sequence[RawWeight],
    biases: Sequence[Tensor] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Linear:
    """One layer computing several projections of the same input, their outputs side by side."""
    bias = None if not biases else torch.cat([bias.float() for bias in biases]).to(device=device, dtype=dtype)
    return Linear(pack(weights, dtype, device), bias)
