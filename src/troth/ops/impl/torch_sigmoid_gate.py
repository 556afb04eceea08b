"""The sigmoid gate through PyTorch, in two passes."""

from __future__ import annotations

import torch
from torch import Tensor

from troth.ops.sigmoid_gate import sigmoid_gate


@sigmoid_gate.provider("torch")
def sigmoid_gate_torch(x_TI: Tensor, gate_TI: Tensor) -> Tensor:
    """As ops.sigmoid_gate."""
    if x_TI.dtype == torch.float32:
        return gate_TI.sigmoid().mul_(x_TI)
    return gate_TI.float().sigmoid_().mul_(x_TI).to(x_TI.dtype)
