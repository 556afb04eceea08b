"""Products of up to 64 tokens with weights of 4 or 8 bits, read at memory speed; more meet the whole matrix as numbers.

A word becomes operands of the matrix units where they want them, in registers: one operation sets two codes into the
mantissas of two numbers, one takes away what is too much. Codes are whole numbers that 16 bits hold exactly; a group's
products are summed first and multiplied by its scale in float32, so nothing is rounded but the result.
Packing: ``triton_groups.py``. Next: ``triton_linear.py``.
Legend: T tokens, O outputs; M, N are a tile's tokens and outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.impl.triton import INTERPRETED, power_of_2
from troth.ops.impl.triton_groups import GroupLinearWeight, code_pair, form_of, header, rows_of_groups
from troth.ops.impl.triton_overlap import await_inputs
from troth.ops.impl.triton_product import fetch
from troth.ops.impl.triton_split_sum import arrivals_of, sum_of_parts

FEW_TOKENS: Final = 16
"""Among so many a token's results are the same bits, however many they are: same splits, same instruction."""
MOST_TOKENS: Final = 64
"""More go to cuBLAS; in float32, more than ``FEW_TOKENS``."""
LEAST_OUTPUTS: Final = 32
"""Of any tile."""
LEAST_BLOCKS: Final = 8
"""Of a part of the inputs."""
MOST_WARPS: Final = {4: 3072, 8: 1024}
"""By bits: inputs are split as long as no more warps come of it."""
REGISTERS: Final = 128
"""Of a thread, up to ``FEW_TOKENS``. Left alone they are 73 to 149, by formats: other numbers of programs at a time, of
which the last ends later (39 us instead of 34 for 16 tokens and 107 MB)."""
FETCHED_BLOCKS: Final = 2
"""Asked for before the tokens are there."""


class Tiling(NamedTuple):
    """How a product is divided."""

    outputs: int
    num_warps: int
    num_stages: int
    most_warps: int
    """As ``MOST_WARPS``."""
    registers: int | None = None
    """Of a thread, at most; None: as the compiler sees fit."""


@triton.jit
def _numbers(
    words: tl.tensor,
    P: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    kind: tl.constexpr,
    DECODE: tl.constexpr,
) -> tl.tensor:
    """kind [N, 32] of int32 [N, 16]: codes of group P minus OFFSET."""
    if DECODE == "":
        first, second = code_pair(words, P, BITS, OFFSET)
        first, second = first.to(kind), second.to(kind)
    else:
        if P > 0:
            words = words >> (P * BITS)
        pair = tl.inline_asm_elementwise(DECODE, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
        first = pair.to(tl.int16).to(kind, bitcast=True)
        second = (pair >> 16).to(tl.int16).to(kind, bitcast=True)
    return tl.reshape(tl.join(first, second), [words.shape[0], 32])


@triton.jit
def _ones(N: tl.constexpr, kind: tl.constexpr) -> tl.tensor:
    """kind [N, 32], laid out as ``_numbers`` are: tokens that meet both then lie in one way."""
    half = tl.full([N, 16], 1.0, tl.float32).to(kind)
    return tl.reshape(tl.join(half, half), [N, 32])


@triton.jit(do_not_specialize=["num_tokens"])
def product_of_groups(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    parts: tl.tensor,
    arrivals: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    DECODE: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = x w^T + bias for M tokens at most; a program computes N outputs, or a part of their inputs."""
    GROUPS: tl.constexpr = 16 // BITS
    INPUTS: tl.constexpr = GROUPS * 32
    PER: tl.constexpr = (WIDTH + INPUTS - 1) // INPUTS // SPLITS
    kind = x.dtype.element_ty
    n, m = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, M)
    w, i = tl.arange(0, 16), tl.arange(0, 32)
    n_inside, m_inside = n < num_outputs, (m < num_tokens)[:, None]
    split = tl.program_id(1)
    at = (split * PER).to(tl.int64) * num_outputs + tl.where(n_inside, n, 0)
    word_at, scale_at, minimum_at = words + at[:, None] * 16 + w[None, :], scales + at, minimums + at
    column = split * (PER * INPUTS) + i
    x_at = x + m.to(tl.int64)[:, None] * x_stride + column[None, :]
    if OVERLAP:
        # Weights never change: they may come before the tokens are there.
        for k in tl.static_range(FETCHED):
            fetch(words + (at + k * num_outputs) * 16)
        if SPLITS > 1:
            fetch(arrivals + tl.program_id(0))
    await_inputs(OVERLAP)
    acc = tl.zeros([N, M], tl.float32)
    # Without its own number of stages a loop fetches ahead what goes into products alone, and waits for scales.
    for k in tl.range(0, PER, num_stages=STAGES):
        word, scale = tl.load(word_at), tl.load(scale_at)
        if MINIMUM:
            minimum = tl.load(minimum_at)
        for p in tl.static_range(GROUPS):
            if WIDTH % INPUTS == 0:
                x_p = tl.load(x_at + p * 32, mask=m_inside, other=0.0)
            else:
                x_inside = m_inside & (column + (k * INPUTS + p * 32) < WIDTH)[None, :]
                x_p = tl.load(x_at + p * 32, mask=x_inside, other=0.0)
            x_p = tl.trans(x_p)
            numbers = _numbers(word, p, BITS, OFFSET, kind, DECODE)
            acc += tl.dot(numbers, x_p, input_precision="ieee") * header(scale, p)[:, None]
            if MINIMUM:
                sums = tl.dot(_ones(N, kind), x_p, input_precision="ieee")
                acc += sums * header(minimum, p)[:, None]
        word_at += num_outputs * 16
        scale_at += num_outputs
        minimum_at += num_outputs
        x_at += INPUTS
    total = tl.trans(acc)
    y_at, y_inside = m.to(tl.int64)[:, None] * num_outputs + n[None, :], m_inside & n_inside[None, :]
    is_last = True
    if SPLITS > 1:
        area = num_tokens.to(tl.int64) * num_outputs
        total, is_last = sum_of_parts(total, parts, arrivals + tl.program_id(0), split, area, y_at, y_inside, SPLITS)
    if is_last:
        if BIAS:
            total += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
        tl.store(y + y_at, total.to(y.dtype.element_ty), mask=y_inside)


def linear_of_groups(x_TI: Tensor, weight: GroupLinearWeight, bias_O: Tensor | None) -> Tensor:
    """As ops.linear."""
    num_tokens, num_outputs = x_TI.shape[0], weight.shape[0]
    if num_tokens > (FEW_TOKENS if x_TI.dtype == torch.float32 else MOST_TOKENS):
        return F.linear(x_TI, rows_of_groups(weight, None, x_TI.dtype, 1.0), bias_O)
    tiling = _tiling(x_TI.dtype, num_tokens, weight)
    tiles, blocks = triton.cdiv(num_outputs, tiling.outputs), len(weight.words_KOW)
    splits = _splits(tiling, tiles, blocks)
    y_TO = torch.empty(num_tokens, num_outputs, dtype=x_TI.dtype, device=x_TI.device)
    parts, arrivals = y_TO, y_TO
    if splits > 1:
        parts = torch.empty(splits, num_tokens, num_outputs, dtype=torch.float32, device=x_TI.device)
        arrivals = arrivals_of(weight.words_KOW, triton.cdiv(num_outputs, LEAST_OUTPUTS))
    product_of_groups[(tiles, splits)](
        x_TI,
        weight.words_KOW,
        weight.scales_KO,
        weight.minimums_KO if weight.minimums_KO is not None else weight.scales_KO,
        bias_O if bias_O is not None else x_TI,
        y_TO,
        parts,
        arrivals,
        x_TI.stride(0),
        num_tokens,
        num_outputs,
        M=max(8, power_of_2(num_tokens)),
        N=tiling.outputs,
        SPLITS=splits,
        STAGES=tiling.num_stages,
        FETCHED=min(FETCHED_BLOCKS, blocks // splits),
        DECODE=_decoder(x_TI.dtype, weight.bits, weight.offset),
        BIAS=bias_O is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.registers,
        **form_of(weight),
    )
    return y_TO


def _tiling(dtype: torch.dtype, num_tokens: int, weight: GroupLinearWeight) -> Tiling:
    """As measured on an H200, matrices of 9 to 107 MB.

    Two warps do not use Hopper's wide instruction, for whose results each group would wait.
    """
    most_warps = MOST_WARPS[weight.bits]
    if dtype == torch.float32:
        # Exact products run on the ordinary units, from registers.
        return Tiling(LEAST_OUTPUTS, 4, 2, most_warps)
    if num_tokens <= 8:
        return Tiling(64, 2, 4, most_warps, REGISTERS)
    if num_tokens <= FEW_TOKENS:
        if weight.minimums_KO is not None:
            # A second set of sums takes 162 registers.
            return Tiling(64, 2, 4, most_warps)
        return Tiling(64, 2, 3 if weight.bits == 4 else 4, most_warps, REGISTERS)
    return Tiling(64, 4, 4, 1024) if num_tokens <= 32 else Tiling(64, 4, 3, 1536)


def _splits(tiling: Tiling, tiles: int, blocks: int) -> int:
    splits = 1
    while (
        2 * splits * tiles * tiling.num_warps <= tiling.most_warps
        and blocks >= 2 * splits * LEAST_BLOCKS
        and blocks % (2 * splits) == 0
    ):
        splits *= 2
    return splits


@cache
def _decoder(dtype: torch.dtype, bits: int, offset: int) -> str:
    """PTX that makes the codes at the low ends of both halves of a word, $1, two numbers of 16 bits minus offset, $0.

    Empty: there is none, in the interpreter and for float32.
    """
    if INTERPRETED or dtype == torch.float32:
        return ""
    whole = round(1 / torch.finfo(dtype).eps)  # From here to its double numbers are whole, and end in their units.
    pairs = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    if 2**bits <= whole:
        return f"""{{
            .reg .b32 code, one, low;
            mov.b32 one, {_twice(1, dtype)};
            mov.b32 low, {_twice(-whole - offset, dtype)};
            lop3.b32 code, $1, {2**bits - 1 << 16 | 2**bits - 1}, {_twice(whole, dtype)}, 0xea;
            fma.rn.{pairs} $0, code, one, low;
        }}"""
    # bfloat16 holds seven bits so. The eighth, inverted, makes 128 or 256 of what is taken away.
    return f"""{{
        .reg .b32 code, less, minus;
        mov.b32 minus, {_twice(-1, dtype)};
        lop3.b32 code, $1, 0x007f007f, {_twice(whole, dtype)}, 0xea;
        lop3.b32 less, $1, 0x00800080, {_twice(2 * whole, dtype)}, 0x6a;
        fma.rn.{pairs} $0, less, minus, code;
    }}"""


def _twice(number: int, dtype: torch.dtype) -> str:
    """A number of 16 bits in both halves of a word."""
    half = int(torch.tensor(number, dtype=dtype).view(torch.int16)) & 0xFFFF
    return f"0x{half:04x}{half:04x}"
