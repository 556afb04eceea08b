"""The gate of a gated MLP by a Triton kernel. Legend: T tokens, I intermediate width."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.gated_activation import Activation, gated_activation
from troth.ops.impl.triton import takes
from troth.ops.impl.triton_elementary import sigmoid
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs

BLOCK: Final = 1024


@triton.jit
def _gated_activation(
    gate_up: tl.tensor,
    y: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(gate_up + token * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + width + i, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        gated = gate * sigmoid(gate)
    else:
        # x (1 + tanh u) / 2 is x sigmoid(2 u), which keeps its precision where the tanh is near -1.
        gated = gate * sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(y + token * width + i, (gated * up).to(y.dtype.element_ty), mask=inside)


def _takes_gated_activation(gate_up_T2I: Tensor, activation: Activation) -> bool:
    return takes(gate_up_T2I) and gate_up_T2I.stride(-1) == 1


@gated_activation.provider("triton", supports=_takes_gated_activation)
def gated_activation_triton(gate_up_T2I: Tensor, activation: Activation) -> Tensor:
    """As ops.gated_activation."""
    num_tokens, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    y_TI = torch.empty(num_tokens, width, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    _gated_activation[(num_tokens, triton.cdiv(width, BLOCK))](
        gate_up_T2I,
        y_TI,
        gate_up_T2I.stride(0),
        width,
        SILU=activation == "silu",
        BLOCK=BLOCK,
        num_warps=4,
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
    )
    return y_TI
