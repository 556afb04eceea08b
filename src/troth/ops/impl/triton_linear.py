"""Products of a few tokens with dense weights by Triton kernels that read them at memory speed; others go to cuBLAS.

One token is multiplied and summed by ordinary arithmetic, up to 32 by the matrix units (``triton_product.py``): the
result of a token does not depend on how many share that kernel.
Legend: T tokens, I inputs, O outputs; N, L are a tile's outputs and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.impl.torch_linear import DenseLinearWeight
from troth.ops.impl.triton import takes
from troth.ops.impl.triton_fp8 import Fp8LinearWeight, multiplies_codes, pack_fp8, rounded
from troth.ops.impl.triton_groups import GroupLinearWeight, pack_groups
from troth.ops.impl.triton_groups_product import linear_of_groups
from troth.ops.impl.triton_overlap import OVERLAP
from troth.ops.impl.triton_product import FEW_CODES, product_of_codes, product_of_few
from troth.ops.linear import PACKERS, LinearWeight, RawWeight, linear

SUMMED_OUTPUTS: Final = 2
"""Outputs of a program: 3.9 to 4.6 TB/s on an H200 for matrices of 33 MB to 1.2 GB, where cuBLAS reaches 2.6 to 4.4."""
SUMMED_INPUTS: Final = 1024
"""Inputs of its tile; matrices of other widths go elsewhere."""
WIDE_INPUTS: Final = 2048
"""The same of codes, where it divides the width: 3.0 to 4.0 TB/s."""
FEW_TOKENS: Final = 32
"""Beyond, cuBLAS is as fast."""


def _pack(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> LinearWeight | None:
    return pack_groups(parts, dtype, device) or pack_fp8(parts, dtype, device)


PACKERS["triton"] = _pack


@triton.jit
def summed_token(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    x_scale: tl.tensor,
    w_scales: tl.tensor,
    y: tl.tensor,
    num_outputs: tl.tensor,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = w x + bias of one token: a program computes N outputs; WIDTH is a multiple of L. SCALED: both are codes."""
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
    if SCALED:
        total *= tl.load(x_scale) * tl.load(w_scales + n, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=inside)


def _takes_linear(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> bool:
    if not takes(x_TI):
        return False
    if type(weight) is DenseLinearWeight:
        return weight.weight_OI.dtype == x_TI.dtype
    return type(weight) is GroupLinearWeight or (type(weight) is Fp8LinearWeight and x_TI.stride(-1) == 1)


@linear.provider("triton", supports=_takes_linear)
def linear_triton(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> Tensor:
    """As ops.linear."""
    if type(weight) is GroupLinearWeight:
        return linear_of_groups(x_TI, weight, bias_O)
    if type(weight) is Fp8LinearWeight:
        return _of_codes(x_TI, weight, bias_O)
    num_tokens = x_TI.shape[0]
    if num_tokens == 1 and weight.shape[1] % SUMMED_INPUTS == 0:
        return _summed(x_TI, weight.weight_OI, bias_O, None, x_TI.dtype)
    if num_tokens <= FEW_TOKENS and x_TI.dtype != torch.float32 and x_TI.stride(-1) == 1:
        return product_of_few(x_TI, weight.weight_OI, bias_O)
    return F.linear(x_TI, weight.weight_OI, bias_O)


def _of_codes(x_TI: Tensor, weight: Fp8LinearWeight, bias_O: Tensor | None) -> Tensor:
    """Both sides as codes, however many tokens there are: what a token gets does not depend on those beside it."""
    codes_TI, scale_T = rounded(x_TI)
    num_tokens, scales = x_TI.shape[0], (scale_T, weight.scale_O)
    if num_tokens == 1 and weight.shape[1] % SUMMED_INPUTS == 0:
        return _summed(codes_TI, weight.codes_OI, bias_O, scales, x_TI.dtype)
    if num_tokens <= FEW_CODES or not multiplies_codes(x_TI, weight):
        return product_of_codes(codes_TI, weight.codes_OI, bias_O, scales, x_TI.dtype)
    y_TO = torch._scaled_mm(
        codes_TI,
        weight.codes_OI.T,
        scale_a=scale_T.unsqueeze(1),
        scale_b=weight.scale_O.unsqueeze(0),
        out_dtype=x_TI.dtype,
        use_fast_accum=True,
    )
    return y_TO if bias_O is None else y_TO.add_(bias_O)


def _summed(
    x_1I: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    scales: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    num_outputs, num_inputs = weight_OI.shape
    wide = WIDE_INPUTS if scales is not None and num_inputs % WIDE_INPUTS == 0 else SUMMED_INPUTS
    y_1O = torch.empty(1, num_outputs, dtype=dtype, device=x_1I.device)
    summed_token[(triton.cdiv(num_outputs, SUMMED_OUTPUTS),)](
        x_1I,
        weight_OI,
        bias_O if bias_O is not None else x_1I,
        *(scales or (x_1I, weight_OI)),
        y_1O,
        num_outputs,
        WIDTH=num_inputs,
        N=SUMMED_OUTPUTS,
        L=wide,
        SCALED=scales is not None,
        BIAS=bias_O is not None,
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
        num_warps=4,
    )
    return y_1O
