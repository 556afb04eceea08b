"""Recurrent layers and the gates around them by the C++ kernels (``csrc/recurrent.h``).

Every token is computed by itself, in one order: prompts, answers and drafts give the same bits.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from troth.ops.gated_delta import Decay, gated_delta
from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.impl import cpu
from troth.ops.multiply import multiply
from troth.ops.rows import Rows
from troth.ops.short_conv import short_conv
from troth.ops.sigmoid_gate import sigmoid_gate

_HEAD_MULTIPLE: Final = 16
"""Head sizes are whole vectors of the widest instruction set."""


def _takes(x: Tensor) -> bool:
    """float32 in main memory, numbers of one token side by side."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1


def _takes_delta(
    qkv_TW: Tensor,
    num_key_heads: int,
    beta_TH: Tensor,
    decay_TH: Tensor,
    decay: Decay,
    state_NHDE: Tensor,
    trail_NLF: Tensor,
    rows: Rows,
) -> bool:
    return (
        _takes(qkv_TW)
        and qkv_TW.is_contiguous()
        and state_NHDE.shape[2] % _HEAD_MULTIPLE == 0
        and state_NHDE.shape[3] % _HEAD_MULTIPLE == 0
        and _takes(beta_TH)
        and beta_TH.stride(0) == decay_TH.stride(0)
        and state_NHDE.is_contiguous()
        and trail_NLF.is_contiguous()
    )


@gated_delta.provider("cpu", supports=_takes_delta)
def gated_delta_cpu(
    qkv_TW: Tensor,
    num_key_heads: int,
    beta_TH: Tensor,
    decay_TH: Tensor,
    decay: Decay,
    state_NHDE: Tensor,
    trail_NLF: Tensor,
    rows: Rows,
) -> Tensor:
    """As ops.gated_delta."""
    _, num_heads, key_dim, value_dim = state_NHDE.shape
    out_THE = torch.empty(qkv_TW.shape[0], num_heads, value_dim)
    arguments = (qkv_TW, beta_TH, decay_TH, decay, state_NHDE, trail_NLF, rows)
    cpu.operations(*arguments, results=(out_THE,)).delta(
        qkv_TW.data_ptr(),
        num_key_heads,
        num_heads,
        key_dim,
        value_dim,
        decay_TH.data_ptr(),
        beta_TH.data_ptr(),
        beta_TH.stride(0),
        decay.rate_H.data_ptr(),
        decay.bias_H.data_ptr(),
        state_NHDE.data_ptr(),
        trail_NLF.data_ptr(),
        cpu.step_rows(rows, trail_NLF.shape[1]),
        out_THE.data_ptr(),
    )
    return out_THE


def _takes_conv(
    x_TC: Tensor, weight_KC: Tensor, state_NJC: Tensor, trail_NLC: Tensor, rows: Rows, silu: bool = True
) -> bool:
    return _takes(x_TC) and weight_KC.is_contiguous() and state_NJC.is_contiguous() and trail_NLC.is_contiguous()


@short_conv.provider("cpu", supports=_takes_conv)
def short_conv_cpu(
    x_TC: Tensor, weight_KC: Tensor, state_NJC: Tensor, trail_NLC: Tensor, rows: Rows, silu: bool = True
) -> Tensor:
    """As ops.short_conv."""
    (num_tokens, channels), num_taps = x_TC.shape, weight_KC.shape[0]
    y_TC = torch.empty(num_tokens, channels)
    cpu.operations(x_TC, weight_KC, state_NJC, trail_NLC, rows, results=(y_TC,)).conv(
        x_TC.data_ptr(),
        x_TC.stride(0),
        weight_KC.data_ptr(),
        num_taps,
        channels,
        silu,
        state_NJC.data_ptr(),
        trail_NLC.data_ptr(),
        cpu.step_rows(rows, trail_NLC.shape[1]),
        y_TC.data_ptr(),
    )
    return y_TC


def _takes_gated_norm(x_THE: Tensor, gate_THE: Tensor, weight_E: Tensor, eps: float) -> bool:
    return _takes(x_THE) and x_THE.is_contiguous() and _takes(gate_THE) and gate_THE.stride(1) == x_THE.shape[2]


@gated_rms_norm.provider("cpu", supports=_takes_gated_norm)
def gated_rms_norm_cpu(x_THE: Tensor, gate_THE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """As ops.gated_rms_norm."""
    y_THE = torch.empty_like(x_THE)
    num_tokens, num_heads, width = x_THE.shape
    cpu.operations(x_THE, gate_THE, weight_E, results=(y_THE,)).gated_norm(
        x_THE.data_ptr(),
        gate_THE.data_ptr(),
        gate_THE.stride(0),
        weight_E.data_ptr(),
        eps,
        y_THE.data_ptr(),
        width,
        num_heads,
        num_tokens,
    )
    return y_THE


def _takes_gate(x_TI: Tensor, gate_TI: Tensor) -> bool:
    return _takes(x_TI) and x_TI.is_contiguous() and _takes(gate_TI)


@sigmoid_gate.provider("cpu", supports=_takes_gate)
def sigmoid_gate_cpu(x_TI: Tensor, gate_TI: Tensor) -> Tensor:
    """As ops.sigmoid_gate."""
    y_TI = torch.empty_like(x_TI)
    num_tokens, width = x_TI.shape
    cpu.operations(x_TI, gate_TI, results=(y_TI,)).gated_norm(
        x_TI.data_ptr(), gate_TI.data_ptr(), gate_TI.stride(0), 0, 0.0, y_TI.data_ptr(), width, 1, num_tokens
    )
    return y_TI


def _takes_both(x_TI: Tensor, gate_TI: Tensor) -> bool:
    return _takes(x_TI) and _takes(gate_TI)


@multiply.provider("cpu", supports=_takes_both)
def multiply_cpu(x_TI: Tensor, gate_TI: Tensor) -> Tensor:
    """As ops.multiply: PyTorch's product, which a recording calls."""
    y_TI = torch.empty(x_TI.shape)

    def compute() -> None:
        torch.mul(x_TI, gate_TI, out=y_TI)

    cpu.call(compute, results=(y_TI,))
    return y_TI
