"""Products of a few tokens with dense weights by Triton kernels that read them at memory speed; others go to cuBLAS.

One token is multiplied and summed by ordinary arithmetic, up to 16 by the matrix units, padded to 16 and summed in one
order: the result of a token does not depend on how many share the kernel.
Legend: T tokens, I inputs, O outputs; M, N, L are a tile's tokens, outputs and inputs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.impl.torch_linear import DenseLinearWeight
from troth.ops.impl.triton import takes
from troth.ops.impl.triton_groups import GroupLinearWeight, linear_of_groups
from troth.ops.impl.triton_overlap import OVERLAP
from troth.ops.linear import linear

SUMMED_OUTPUTS: Final = 2
"""Outputs of a program: 3.9 to 4.6 TB/s on an H200 for matrices of 33 MB to 1.2 GB, where cuBLAS reaches 2.6 to 4.4."""
TILED_TOKENS: Final = 16
"""Beyond, cuBLAS is as fast."""
INPUTS_MULTIPLE: Final = 1024
"""Inputs of a tile: shapes of other widths go to cuBLAS."""
MANY_OUTPUTS: Final = 16384


@triton.jit
def summed_token(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    num_outputs: tl.tensor,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = w x + bias of one token: a program computes N outputs; WIDTH is a multiple of L."""
    n, i = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, L)
    inside = n < num_outputs
    w_at = w + tl.where(inside, n, 0).to(tl.int64)[:, None] * WIDTH + i[None, :]
    # Weights never change: the first of them may come before the token is there.
    tile = tl.load(w_at)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([N, L], tl.float32)
    for first in tl.static_range(0, WIDTH, L):
        values = tile.to(tl.float32)
        if first + L < WIDTH:
            tile = tl.load(w_at + first + L)
        acc += values * tl.load(x + first + i).to(tl.float32)[None, :]
    total = tl.sum(acc, axis=1)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def tiled_tokens(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = x w^T + bias for M tokens at most: a program computes N outputs of all tokens."""
    m, n, i = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, L)
    w_at = w + n.to(tl.int64)[None, :] * WIDTH + i[:, None]
    w_inside = (n < num_outputs)[None, :]
    x_at = x + m[:, None] * x_stride + i[None, :]
    x_inside = (m < num_tokens)[:, None]
    tile = tl.load(w_at, mask=w_inside, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.dot(tl.load(x_at, mask=x_inside, other=0.0), tile, input_precision="ieee")
    for first in range(L, WIDTH, L):
        x_tile = tl.load(x_at + first, mask=x_inside, other=0.0)
        acc = tl.dot(x_tile, tl.load(w_at + first, mask=w_inside, other=0.0), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
    y_at = y + m[:, None] * num_outputs + n[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=x_inside & w_inside)


def _takes_linear(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> bool:
    if not takes(x_TI):
        return False
    if type(weight) is DenseLinearWeight:
        return weight.weight_OI.dtype == x_TI.dtype
    return type(weight) is GroupLinearWeight


@linear.provider("triton", supports=_takes_linear)
def linear_triton(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> Tensor:
    """As ops.linear."""
    if type(weight) is GroupLinearWeight:
        return linear_of_groups(x_TI, weight, bias_O)
    num_tokens, (num_outputs, num_inputs) = x_TI.shape[0], weight.shape
    if num_tokens > TILED_TOKENS or num_inputs % INPUTS_MULTIPLE or x_TI.stride(-1) != 1:
        return F.linear(x_TI, weight.weight_OI, bias_O)
    y_TO = torch.empty(num_tokens, num_outputs, dtype=x_TI.dtype, device=x_TI.device)
    arguments = (x_TI, weight.weight_OI, bias_O if bias_O is not None else x_TI, y_TO)
    form = {"WIDTH": num_inputs, "BIAS": bias_O is not None, "OVERLAP": OVERLAP, "launch_pdl": OVERLAP, "num_warps": 4}
    if num_tokens == 1:
        grid = (triton.cdiv(num_outputs, SUMMED_OUTPUTS),)
        summed_token[grid](*arguments, num_outputs, N=SUMMED_OUTPUTS, L=INPUTS_MULTIPLE, **form)
    else:
        outputs, inputs = (64, 128) if num_outputs >= MANY_OUTPUTS else (32, 256)
        grid = (triton.cdiv(num_outputs, outputs),)
        sizes = (x_TI.stride(0), num_tokens, num_outputs)
        tiled_tokens[grid](*arguments, *sizes, M=TILED_TOKENS, N=outputs, L=inputs, num_stages=4, **form)
    return y_TO
