"""RMSNorm of a head, then a SiLU gate: what Mamba-2 and Gated DeltaNet do to the outputs of their recurrences.

Legend: T tokens, H heads, E head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.registry import Tolerance, op
from troth.ops.rms_norm import rms_norm


@op(
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5, "a float32 mean of E squares in another order, another exp"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "one rounding of the output to 8 bits of mantissa"),
        torch.float16: Tolerance(1e-3, 2e-3, "one rounding of the output to 11 bits of mantissa"),
    }
)
def gated_rms_norm(x_THE: Tensor, gate_THE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension.

    Args:
        x_THE: float [T, H, E].
        gate_THE: float [T, H, E]; tokens may be strided.
        weight_E: float32 [E], the multiplier itself.
        eps: added to the mean square.

    Returns:
        float [T, H, E], dtype of x; computed in float32, rounded once.
    """
    return (rms_norm.reference(x_THE.float(), weight_E, eps) * F.silu(gate_THE.float())).to(x_THE.dtype)
