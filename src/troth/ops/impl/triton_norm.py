"""RMSNorm by Triton kernels: alone, after a residual sum, before a gate. One program per row, one pass.

Legend: T tokens, D width, H heads, E head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.impl.triton import power_of_2, takes, warps
from troth.ops.impl.triton_elementary import sigmoid
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.rms_norm import add_rms_norm, rms_norm


@triton.jit
def _normed(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, width: tl.tensor) -> tl.tensor:
    """float32 [BLOCK]; values past ``width`` are 0."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) / width + eps)) * weight


@triton.jit
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    values = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + i, mask=inside, other=0.0)
    tl.store(y + row * width + i, _normed(values, weights, eps, width).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(
    x: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    at = row * width + i
    added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    values = (tl.load(total + at, mask=inside, other=0.0).to(tl.float32) + added).to(total.dtype.element_ty)
    weights = tl.load(weight + i, mask=inside, other=0.0)
    tl.store(total + at, values, mask=inside)
    # The norm is of the sum as it is kept, rounded.
    tl.store(y + at, _normed(values.to(tl.float32), weights, eps, width).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gated_rms_norm(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    gate_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    token, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, BLOCK)
    inside = i < width
    at = (token * num_heads + head) * width + i
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + head * width + i, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + i, mask=inside, other=0.0)
    gated = _normed(values, weights, eps, width) * (gates * sigmoid(gates))
    tl.store(y + at, gated.to(y.dtype.element_ty), mask=inside)


def _takes_rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> bool:
    return takes(x_TD) and x_TD.stride(-1) == 1


@rms_norm.provider("triton", supports=_takes_rms_norm)
def rms_norm_triton(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """As ops.rms_norm."""
    width = weight_D.shape[0]
    flat = x_TD.reshape(-1, width)
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    block = power_of_2(width)
    _rms_norm[(flat.shape[0],)](
        flat,
        weight_D,
        y_TD,
        flat.stride(0),
        width,
        eps,
        BLOCK=block,
        num_warps=warps(block),
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
    )
    return y_TD


def _takes_add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> bool:
    return takes(x_TD) and x_TD.is_contiguous() and residual_TD.is_contiguous() and residual_TD.dtype == x_TD.dtype


@add_rms_norm.provider("triton", supports=_takes_add_rms_norm)
def add_rms_norm_triton(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ops.add_rms_norm; ``residual`` is overwritten with the sum."""
    num_tokens, width = x_TD.shape
    y_TD = torch.empty_like(x_TD)
    block = power_of_2(width)
    _add_rms_norm[(num_tokens,)](
        x_TD,
        residual_TD,
        weight_D,
        y_TD,
        width,
        eps,
        BLOCK=block,
        num_warps=warps(block),
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
    )
    return y_TD, residual_TD


def _takes_gated_rms_norm(x_THE: Tensor, gate_THE: Tensor, weight_E: Tensor, eps: float) -> bool:
    return takes(x_THE) and x_THE.is_contiguous() and gate_THE.stride()[1:] == x_THE.stride()[1:]


@gated_rms_norm.provider("triton", supports=_takes_gated_rms_norm)
def gated_rms_norm_triton(x_THE: Tensor, gate_THE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """As ops.gated_rms_norm."""
    num_tokens, num_heads, width = x_THE.shape
    y_THE = torch.empty_like(x_THE)
    block = power_of_2(width)
    _gated_rms_norm[(num_tokens, num_heads)](
        x_THE,
        gate_THE,
        weight_E,
        y_THE,
        gate_THE.stride(0),
        width,
        eps,
        BLOCK=block,
        num_warps=warps(block),
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
    )
    return y_THE
