"""RMSNorm and the gated activation by the C++ kernels."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from troth.ops.gated_activation import Activation, gated_activation
from troth.ops.impl import cpu
from troth.ops.rms_norm import add_rms_norm, rms_norm

_ACTIVATIONS: Final[dict[Activation, int]] = {"silu": 0, "gelu_tanh": 1}


def _takes_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> bool:
    return x_TD.dtype == torch.float32 and x_TD.device.type == "cpu" and x_TD.is_contiguous()


@rms_norm.provider("cpu", supports=_takes_norm)
def rms_norm_cpu(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As ops.rms_norm."""
    y_TD = torch.empty_like(x_TD)
    width = x_TD.shape[-1]
    operations = cpu.operations(x_TD, weight_D, results=(y_TD,))
    operations.norm(x_TD.data_ptr(), 0, 0, weight_D.data_ptr(), eps, y_TD.data_ptr(), width, x_TD.numel() // width)
    return y_TD


def _takes_add_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> bool:
    return _takes_norm(x_TD, weight_D, eps) and residual_TD.is_contiguous()


@add_rms_norm.provider("cpu", supports=_takes_add_norm)
def add_rms_norm_cpu(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ops.add_rms_norm; ``residual`` becomes the sum."""
    y_TD = torch.empty_like(x_TD)
    width = x_TD.shape[-1]
    operations = cpu.operations(x_TD, weight_D, results=(y_TD, residual_TD))
    operations.norm(
        x_TD.data_ptr(),
        residual_TD.data_ptr(),
        residual_TD.data_ptr(),
        weight_D.data_ptr(),
        eps,
        y_TD.data_ptr(),
        width,
        x_TD.numel() // width,
    )
    return y_TD, residual_TD


def _takes_gate(gate_up_T2I: Tensor, activation: Activation) -> bool:
    return gate_up_T2I.dtype == torch.float32 and gate_up_T2I.device.type == "cpu" and gate_up_T2I.is_contiguous()


@gated_activation.provider("cpu", supports=_takes_gate)
def gated_activation_cpu(gate_up_T2I: Tensor, activation: Activation) -> Tensor:
    """As ops.gated_activation."""
    num_tokens, inner = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    y_TI = torch.empty(num_tokens, inner)
    operations = cpu.operations(gate_up_T2I, results=(y_TI,))
    operations.gate(gate_up_T2I.data_ptr(), _ACTIVATIONS[activation], y_TI.data_ptr(), inner, num_tokens)
    return y_TI
