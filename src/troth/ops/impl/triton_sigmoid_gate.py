"""The sigmoid gate by a Triton kernel. Legend: T tokens, I width."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.impl.triton import takes
from troth.ops.impl.triton_elementary import sigmoid
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.sigmoid_gate import sigmoid_gate

BLOCK: Final = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _gate(
    x: tl.tensor,
    gate: tl.tensor,
    y: tl.tensor,
    num_tokens: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # What is known of the width is known of the product: loads of 16 bytes need a multiple of 16.
    inside = i < num_tokens.to(tl.int64) * width
    gates = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + i, (values * sigmoid(gates)).to(y.dtype.element_ty), mask=inside)


def _takes(x_TI: Tensor, gate_TI: Tensor) -> bool:
    return takes(x_TI) and x_TI.is_contiguous() and gate_TI.is_contiguous()


@sigmoid_gate.provider("triton", supports=_takes)
def sigmoid_gate_triton(x_TI: Tensor, gate_TI: Tensor) -> Tensor:
    """As ops.sigmoid_gate."""
    y_TI = torch.empty_like(x_TI)
    num_tokens, width = x_TI.shape
    _gate[(triton.cdiv(num_tokens * width, BLOCK),)](
        x_TI, gate_TI, y_TI, num_tokens, width, BLOCK=BLOCK, num_warps=4, OVERLAP=OVERLAP, launch_pdl=OVERLAP
    )
    return y_TI
