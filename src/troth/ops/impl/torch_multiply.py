"""The plain gate through PyTorch, in one pass."""

from __future__ import annotations

from torch import Tensor

from troth.ops.multiply import multiply


@multiply.provider("torch")
def multiply_torch(x_TI: Tensor, gate_TI: Tensor) -> Tensor:
    """As ops.multiply."""
    return x_TI * gate_TI
