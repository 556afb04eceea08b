"""The gated feed-forward layer (Shazeer 2020), and what every feed-forward layer is to a block.

Legend: T tokens, D model width, I intermediate width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from troth.nn.linear import Linear
from troth.ops.gated_activation import Activation, gated_activation
from troth.ops.rows import Rows


class FeedForward(Protocol):
    """Whatever computes each token by itself: one gated layer, or a choice of experts."""

    def __call__(self, x_TD: Tensor, rows: Rows) -> Tensor:
        """float [T, D] -> float [T, D]."""


@dataclass(slots=True)
class GatedMLP:
    """down(act(gate x) * up x), gate and up in one product."""

    gate_up: Linear
    down: Linear
    activation: Activation = "silu"

    def __call__(self, x_TD: Tensor, rows: Rows) -> Tensor:
        """float [T, D] -> float [T, D]."""
        return self.down(gated_activation(self.gate_up(x_TD, rows), self.activation), rows)
