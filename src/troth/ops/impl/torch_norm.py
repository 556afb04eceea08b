"""RMSNorm through PyTorch's fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.rms_norm import add_rms_norm, rms_norm


@rms_norm.provider("torch")
def rms_norm_torch(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As ops.rms_norm."""
    if x_TD.dtype == torch.float32:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    # The fused kernel wants one dtype; weights stay float32 so that 1 + w is not rounded twice.
    return F.rms_norm(x_TD.float(), weight_D.shape, weight_D, eps).to(x_TD.dtype)


@add_rms_norm.provider("torch")
def add_rms_norm_torch(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ops.add_rms_norm; ``residual`` is overwritten with the sum."""
    total_TD = residual_TD.add_(x_TD)
    return rms_norm_torch(total_TD, weight_D, eps), total_TD


@gated_rms_norm.provider("torch")
def gated_rms_norm_torch(x_THE: Tensor, gate_THE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """As ops.gated_rms_norm."""
    normed = F.rms_norm(x_THE.float(), weight_E.shape, weight_E, eps)
    return normed.mul_(F.silu(gate_THE.float())).to(x_THE.dtype)
