"""The gate of a gated MLP: act(gate) * up (Shazeer 2020). Legend: T tokens, I intermediate width."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.registry import Tolerance, op

Activation = Literal["silu", "gelu_tanh"]


@op(
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-5, "another exp or tanh implementation"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "one rounding of the output to 8 bits of mantissa"),
        torch.float16: Tolerance(1e-3, 2e-3, "one rounding of the output to 11 bits of mantissa"),
    }
)
def gated_activation(gate_up_T2I: Tensor, activation: Activation) -> Tensor:
    """act(first half) * second half.

    Args:
        gate_up_T2I: float [T, 2 I], gate values then up values.
        activation: silu, or gelu in its tanh form.

    Returns:
        float [T, I], same dtype; computed in float32, rounded once.
    """
    gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
    gated_TI = F.silu(gate_TI) if activation == "silu" else F.gelu(gate_TI, approximate="tanh")
    return (gated_TI * up_TI).to(gate_up_T2I.dtype)
