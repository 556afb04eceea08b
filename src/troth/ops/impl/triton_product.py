"""Products of tokens with a dense matrix by the matrix units.

A unit adds the products of 16 inputs at a time to what it has, by the same arithmetic in every shape of its
instructions. So where each sum runs over all inputs in order, a token's results depend neither on how many tokens share
the product nor on the tiling: bit for bit, which ``tests/device`` holds to. Where few tokens meet a matrix of few
outputs, programs may also share the inputs (``triton_split_sum.py``).
Next: ``triton_linear.py``, ``triton_invariant.py``.
Legend: T tokens, I inputs, O outputs; M, N, L are a tile's tokens, outputs and inputs; S parts of the inputs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.codes import FP8
from troth.ops.impl.triton import power_of_2
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.impl.triton_split_sum import arrivals_of, sum_of_parts

WEIGHTS_FIRST: Final = 64
"""Outputs of a tile from which Hopper's wide instruction takes the weights as its first operand, straight from shared
memory: the second, the tokens, may then be few."""
FETCHED_BYTES: Final = 512
"""Of each output, asked for before the tokens are there."""
FETCHED_TOKENS: Final = 128
"""More wait for the matrix units, not for memory."""
TOGETHER: Final = 8
"""Tiles of tokens that meet the same outputs at about the same time."""


FEW_CODES: Final = 64
"""Tokens of a tile of codes, up to which inputs are split."""
MANY_OUTPUTS: Final = 16384
MOST_PROGRAMS: Final = 160
"""Where tiles of outputs are fewer, inputs are split: an H200 has 132 processors."""
LEAST_INPUTS: Final = 1024
"""Of a part."""

IMPRECISE: Final = tl.constexpr(128)
"""Products of fp8 that a unit adds up with 14 bits, before float32 takes them over."""


class Tiling(NamedTuple):
    """How a product is divided."""

    tokens: int
    outputs: int
    inputs: int
    num_stages: int
    num_warps: int
    splits: int = 1


@triton.jit
def fetch(at: tl.tensor) -> None:
    """Ask for memory behind pointers to come nearer, into the second cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _tile_product(x_tile: tl.tensor, w_tile: tl.tensor, acc: tl.tensor, WEIGHTS_FIRST: tl.constexpr) -> tl.tensor:
    if WEIGHTS_FIRST:
        return tl.dot(w_tile, tl.trans(x_tile), acc, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)
    else:
        return tl.dot(x_tile, tl.trans(w_tile), acc, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)


@triton.jit(do_not_specialize=["num_tokens"])
def product(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    x_scales: tl.tensor,
    w_scales: tl.tensor,
    y: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    width: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    TOGETHER: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    FETCHED: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = x w^T + bias; a program computes M tokens by N outputs, or a part of their inputs.

    SCALED: both are codes, with a scale for each token and each output.
    EVEN: the width is a multiple of L SPLITS; so it must be where inputs are split.
    """
    # Programs side by side share weights: those of TOGETHER tiles of tokens, before the next outputs.
    tiles_m, tiles_n = tl.cdiv(num_tokens, M), tl.cdiv(num_outputs, N)
    group = tl.program_id(0) // (TOGETHER * tiles_n)
    place = tl.program_id(0) % (TOGETHER * tiles_n)
    size = tl.minimum(tiles_m - group * TOGETHER, TOGETHER)
    m = (group * TOGETHER + place % size) * M + tl.arange(0, M)
    n, i = place // size * N + tl.arange(0, N), tl.arange(0, L)
    m_inside, n_inside = m < num_tokens, n < num_outputs
    split, span = tl.program_id(1), width // SPLITS
    begin = tl.multiple_of(split * span, 16)
    w_row = w + tl.where(n_inside, n, 0).to(tl.int64)[:, None] * width + begin
    x_at = x + m.to(tl.int64)[:, None] * x_stride + begin + i[None, :]
    x_inside = m_inside[:, None]
    w_at = w_row + i[None, :]
    if OVERLAP and FETCHED > 0:
        # Weights never change: they may come before the tokens are there.
        LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
        fetch(w_row + tl.arange(0, FETCHED // LINE)[None, :] * LINE)
    await_inputs(OVERLAP)
    acc = tl.zeros([N, M] if WEIGHTS_FIRST else [M, N], tl.float32)
    for first in range(0, span, L):
        if EVEN:
            w_tile = tl.load(w_at + first)
            x_tile = tl.load(x_at + first, mask=x_inside, other=0.0)
        else:
            held = (first + i < span)[None, :]
            w_tile = tl.load(w_at + first, mask=held, other=0.0)
            x_tile = tl.load(x_at + first, mask=x_inside & held, other=0.0)
        acc = _tile_product(x_tile, w_tile, acc, WEIGHTS_FIRST)
    if WEIGHTS_FIRST:
        acc = tl.trans(acc)
    at, inside = m.to(tl.int64)[:, None] * num_outputs + n[None, :], m_inside[:, None] & n_inside[None, :]
    is_last = True
    if SPLITS > 1:
        area = num_tokens.to(tl.int64) * num_outputs
        acc, is_last = sum_of_parts(acc, parts, arrivals + tl.program_id(0), split, area, at, inside, SPLITS)
    if is_last:
        if SCALED:
            x_scale = tl.load(x_scales + m, mask=m_inside, other=0.0)
            acc *= x_scale[:, None] * tl.load(w_scales + n, mask=n_inside, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)


def ordered_product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ weight^T + bias, float [T, O], every sum in order. Both matrices are of one dtype, rows side by side."""
    return _product(x_TI, weight_OI, bias_O, _tiling(x_TI.dtype, x_TI.shape[0], weight_OI.shape[0]))


def product_of_few(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The same for up to 32 tokens of 16 bits, with inputs split where that is faster: always alike for one matrix."""
    return _product(x_TI, weight_OI, bias_O, _few_tiling(x_TI, weight_OI))


def product_of_codes(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scales: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """The same of fp8 codes, ``scales`` of tokens and of outputs, as ``dtype``."""
    return _product(x_TI, weight_OI, bias_O, _few_tiling(x_TI, weight_OI), scales, dtype)


def _few_tiling(x_TI: Tensor, weight_OI: Tensor) -> Tiling:
    num_outputs, width = weight_OI.shape
    tiling = _tiling(x_TI.dtype, x_TI.shape[0], num_outputs)
    tiles, splits = triton.cdiv(num_outputs, tiling.outputs), 1
    while (
        x_TI.shape[0] <= FEW_CODES
        and 2 * splits * tiles <= MOST_PROGRAMS
        and width >= 2 * splits * LEAST_INPUTS
        and width % (2 * splits * tiling.inputs) == 0
    ):
        splits *= 2
    return tiling._replace(splits=splits)


def _product(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    tiling: Tiling,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    num_tokens, (num_outputs, width) = x_TI.shape[0], weight_OI.shape
    y_TO = torch.empty(num_tokens, num_outputs, dtype=dtype or x_TI.dtype, device=x_TI.device)
    fetched = FETCHED_BYTES // weight_OI.element_size()
    tiles = triton.cdiv(num_tokens, tiling.tokens) * triton.cdiv(num_outputs, tiling.outputs)
    parts, arrivals = y_TO, y_TO
    if tiling.splits > 1:
        parts = torch.empty(tiling.splits, num_tokens, num_outputs, dtype=torch.float32, device=x_TI.device)
        arrivals = arrivals_of(weight_OI, tiles)
    product[(tiles, tiling.splits)](
        x_TI,
        weight_OI,
        bias_O if bias_O is not None else x_TI,
        *(scales or (x_TI, weight_OI)),
        y_TO,
        parts,
        arrivals,
        x_TI.stride(0),
        num_tokens,
        num_outputs,
        width,
        M=tiling.tokens,
        N=tiling.outputs,
        L=tiling.inputs,
        SPLITS=tiling.splits,
        EVEN=width % tiling.inputs == 0,
        TOGETHER=TOGETHER,
        WEIGHTS_FIRST=tiling.outputs >= WEIGHTS_FIRST,
        FETCHED=fetched if num_tokens <= FETCHED_TOKENS and width >= fetched else 0,
        SCALED=scales is not None,
        BIAS=bias_O is not None,
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return y_TO


def _tiling(dtype: torch.dtype, num_tokens: int, num_outputs: int) -> Tiling:
    """As measured on an H200, matrices of 33 to 201 MB: 3.0 to 4.2 TB/s up to 32 tokens, 610 to 700 TFLOP/s of many."""
    if dtype == torch.float32:
        # Exact products run on the ordinary units, from registers.
        return Tiling(16, 32, 32, 2, 4)
    if dtype == FP8:
        # 2.0 to 3.9 TB/s up to 32 tokens, 1.9 to 3.3 up to 64, where cuBLAS reaches 1.2 to 3.2.
        few = num_tokens <= FEW_CODES
        return Tiling(max(16, power_of_2(num_tokens)), 64, 128, 6, 4) if few else Tiling(128, 64, 128, 4, 4)
    if num_tokens <= 32:
        return Tiling(max(16, power_of_2(num_tokens)), 64, 128, 3 if num_outputs >= MANY_OUTPUTS else 5, 4)
    if num_tokens <= 64:
        return Tiling(64, 64, 128, 4, 4)
    if num_tokens <= 128:
        return Tiling(128, 64, 64, 3, 4) if num_outputs >= MANY_OUTPUTS else Tiling(128, 64, 128, 4, 4)
    return Tiling(128, 128, 64, 4, 8) if num_tokens <= 1024 else Tiling(256, 128, 64, 3, 8)
