"""Weights of 4 or 8 bits in groups of 32 with a scale each, multiplied by Triton kernels without being unpacked first.

GGUF's Q8_0, Q4_0 and Q4_1 (layouts: ggml-common.h) are taken apart once, at load: codes in one tensor, scales in
another, minimums in a third. A few tokens are multiplied by numbers made in registers; for many, the whole matrix is
made in memory once per product and goes to cuBLAS.
Legend: T tokens, I inputs, O outputs, C bytes of codes of a row, B = I / 32 groups; M, N, S are a tile's tokens,
outputs and groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from troth.artifact.ggml_types import GgmlType
from troth.ops.impl.triton import FLOATS, INTERPRETED, power_of_2
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.linear import PACKERS, RawWeight
from troth.weights.quantized import QuantTensor

GROUP: Final = 32
SUMMED_TOKENS: Final = 4
TILED_TOKENS: Final = 16
"""More go to cuBLAS."""
SUMMED_GROUPS: Final = 128
MANY_OUTPUTS: Final = 16384
HEADERS: Final = {GgmlType.Q8_0: 2, GgmlType.Q4_0: 2, GgmlType.Q4_1: 4}
"""Bytes before the codes of a block: its scale, then its minimum if it has one."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupLinearWeight:
    """value = scale * (code - offset) + minimum."""

    codes_OC: Tensor
    """int8 [O, I], or uint8 [O, I / 2]: value j of a group in the low half of byte j, value j + 16 in its high half."""
    scale_OB: Tensor
    """float16."""
    minimum_OB: Tensor | None
    """float16; None: 0."""
    offset: int
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        parts = (self.codes_OC, self.scale_OB, *([] if self.minimum_OB is None else [self.minimum_OB]))
        return sum(part.numel() * part.element_size() for part in parts)


def _pack(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> GroupLinearWeight | None:
    if (device.type == "cuda") == INTERPRETED or dtype not in FLOATS:
        return None
    quantised = [part for part in parts if isinstance(part, QuantTensor)]
    kind = quantised[0].ggml_type if quantised else None
    if kind not in HEADERS or len(quantised) != len(parts) or any(part.ggml_type != kind for part in quantised):
        return None
    inputs, outputs = quantised[0].shape[1], sum(part.shape[0] for part in quantised)
    blocks = torch.cat([part.raw.to(device) for part in quantised]).view(outputs, inputs // GROUP, -1)
    header = blocks[:, :, : HEADERS[kind]].contiguous().view(torch.float16)
    codes = blocks[:, :, HEADERS[kind] :].reshape(outputs, -1)
    return GroupLinearWeight(
        codes_OC=codes.view(torch.int8) if kind == GgmlType.Q8_0 else codes,
        scale_OB=header[:, :, 0].contiguous(),
        minimum_OB=header[:, :, 1].contiguous() if kind == GgmlType.Q4_1 else None,
        offset=8 if kind == GgmlType.Q4_0 else 0,
        shape=(outputs, inputs),
    )


PACKERS["triton"] = _pack


@triton.jit
def _values(
    codes: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    row: tl.tensor,
    first_group: tl.tensor,
    inside: tl.tensor,
    GROUPS: tl.constexpr,
    S: tl.constexpr,
    FOUR: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr,
) -> tl.tensor:
    """float32 [N, S, 16] twice: the first and the second half of each of S groups of N rows, 0 where not ``inside``."""
    group, j = first_group + tl.arange(0, S), tl.arange(0, 16)
    held = inside[:, None] & (group < GROUPS)[None, :]
    at = row.to(tl.int64)[:, None] * GROUPS + group[None, :]
    scale = tl.load(scales + at, mask=held, other=0.0).to(tl.float32)[:, :, None]
    if FOUR:
        byte = tl.load(codes + at[:, :, None] * 16 + j[None, None, :], mask=held[:, :, None], other=0)
        low, high = (byte & 15).to(tl.float32) - OFFSET, (byte >> 4).to(tl.float32) - OFFSET
    else:
        code_at = codes + at[:, :, None] * 32 + j[None, None, :]
        low = tl.load(code_at, mask=held[:, :, None], other=0).to(tl.float32)
        high = tl.load(code_at + 16, mask=held[:, :, None], other=0).to(tl.float32)
    low, high = scale * low, scale * high
    if MINIMUM:
        minimum = tl.load(minimums + at, mask=held, other=0.0).to(tl.float32)[:, :, None]
        low, high = low + minimum, high + minimum
    return low, high


@triton.jit
def _codes(codes: tl.tensor, at: tl.tensor, FOUR: tl.constexpr, OFFSET: tl.constexpr) -> tl.tensor:
    """float32 [N, S, 16] twice: code - offset, of the first and the second half of the groups at ``at`` [N, S].

    Bits become the low end of 2^23's mantissa, which costs less than a conversion of integers.
    """
    j = tl.arange(0, 16)
    if FOUR:
        byte = tl.load(codes + at[:, :, None] * 16 + j[None, None, :]).to(tl.int32)
        low, high = byte & 15, byte >> 4
    else:
        code_at = codes + at[:, :, None] * 32 + j[None, None, :]
        low = (tl.load(code_at).to(tl.int32) & 255) ^ 128
        high = (tl.load(code_at + 16).to(tl.int32) & 255) ^ 128
    zero = 8388608.0 + (OFFSET if FOUR else 128)
    low = (low | 0x4B000000).to(tl.float32, bitcast=True) - zero
    high = (high | 0x4B000000).to(tl.float32, bitcast=True) - zero
    return low, high


@triton.jit
def _sums(
    x: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    S: tl.constexpr,
    MINIMUM: tl.constexpr,
) -> tl.tensor:
    """float32 [N, S]: what each group adds to the product with one token, ``x`` at the first of S groups."""
    i = tl.arange(0, S)[:, None] * 32 + tl.arange(0, 16)[None, :]
    x_low, x_high = tl.load(x + i).to(tl.float32), tl.load(x + i + 16).to(tl.float32)
    y = tl.sum(low * x_low[None, :, :] + high * x_high[None, :, :], axis=2) * scale
    if MINIMUM:
        y += minimum * tl.sum(x_low + x_high, axis=1)[None, :]
    return y


@triton.jit
def summed_tokens_of_groups(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    GROUPS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    FOUR: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = x w^T + bias for M tokens at most, of 1, 2 and 4; GROUPS is a multiple of S."""
    n, s = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, S)
    inside = n < num_outputs
    row_at = tl.where(inside, n, 0).to(tl.int64)[:, None] * GROUPS + s[None, :]
    last = num_tokens - 1
    x1, x2, x3 = (
        x + tl.minimum(last, 1) * x_stride,
        x + tl.minimum(last, 2) * x_stride,
        x + tl.minimum(last, 3) * x_stride,
    )
    acc0 = tl.zeros([N, S], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    for first in tl.static_range(0, GROUPS, S):
        at = row_at + first
        low, high = _codes(codes, at, FOUR, OFFSET)
        scale = tl.load(scales + at).to(tl.float32)
        minimum = tl.load(minimums + at).to(tl.float32) if MINIMUM else scale
        # Weights never change: the first of them come before the tokens are there.
        if first == 0:
            await_inputs(OVERLAP)
        acc0 += _sums(x + first * 32, low, high, scale, minimum, S, MINIMUM)
        if M > 1:
            acc1 += _sums(x1 + first * 32, low, high, scale, minimum, S, MINIMUM)
        if M > 2:
            acc2 += _sums(x2 + first * 32, low, high, scale, minimum, S, MINIMUM)
            acc3 += _sums(x3 + first * 32, low, high, scale, minimum, S, MINIMUM)
    add = tl.zeros([N], tl.float32)
    if BIAS:
        add = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    kind = y.dtype.element_ty
    y_at = y + n
    tl.store(y_at, (tl.sum(acc0, axis=1) + add).to(kind), mask=inside)
    if M > 1:
        tl.store(y_at + num_outputs, (tl.sum(acc1, axis=1) + add).to(kind), mask=inside & (num_tokens > 1))
    if M > 2:
        tl.store(y_at + 2 * num_outputs, (tl.sum(acc2, axis=1) + add).to(kind), mask=inside & (num_tokens > 2))
        tl.store(y_at + 3 * num_outputs, (tl.sum(acc3, axis=1) + add).to(kind), mask=inside & (num_tokens > 3))


@triton.jit
def tiled_tokens_of_groups(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    GROUPS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    FOUR: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = x w^T + bias for M tokens at most: a program computes N outputs of all tokens, S groups at a time."""
    await_inputs(OVERLAP)
    m, n = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    inside, wanted = n < num_outputs, m < num_tokens
    half = tl.arange(0, S * 16)
    acc = tl.zeros([M, N], tl.float32)
    for first in range(0, GROUPS, S):
        low, high = _values(codes, scales, minimums, n, first, inside, GROUPS, S, FOUR, OFFSET, MINIMUM)
        i = (first + half // 16) * 32 + half % 16
        x_inside = wanted[:, None] & (i < GROUPS * 32)[None, :]
        x_at = x + m[:, None] * x_stride + i[None, :]
        x_low, x_high = tl.load(x_at, mask=x_inside, other=0.0), tl.load(x_at + 16, mask=x_inside, other=0.0)
        acc = tl.dot(x_low, tl.trans(tl.reshape(low, [N, S * 16]).to(x_low.dtype)), acc, input_precision="ieee")
        acc = tl.dot(x_high, tl.trans(tl.reshape(high, [N, S * 16]).to(x_low.dtype)), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_at = y + m[:, None] * num_outputs + n[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=wanted[:, None] & inside[None, :])


@triton.jit
def _rows(
    row_ids: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    y: tl.tensor,
    num_rows: tl.tensor,
    factor: tl.tensor,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    FOUR: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr,
    LISTED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = the rows of ``row_ids``, or all in order if not LISTED, as numbers, times ``factor`` after rounding."""
    await_inputs(OVERLAP)
    n = tl.program_id(0) * N + tl.arange(0, N)
    first = tl.program_id(1) * S
    inside = n < num_rows
    row = tl.load(row_ids + n, mask=inside, other=0) if LISTED else n.to(tl.int64)
    low, high = _values(codes, scales, minimums, row, first, inside, GROUPS, S, FOUR, OFFSET, MINIMUM)
    group, j = first + tl.arange(0, S), tl.arange(0, 16)
    at = n.to(tl.int64)[:, None, None] * (GROUPS * 32) + group[None, :, None] * 32 + j[None, None, :]
    held = inside[:, None, None] & (group < GROUPS)[None, :, None]
    kind = y.dtype.element_ty
    tl.store(y + at, (low.to(kind).to(tl.float32) * factor).to(kind), mask=held)
    tl.store(y + at + 16, (high.to(kind).to(tl.float32) * factor).to(kind), mask=held)


def _form(weight: GroupLinearWeight) -> dict[str, Any]:
    return {
        "GROUPS": weight.shape[1] // GROUP,
        "FOUR": weight.codes_OC.dtype == torch.uint8,
        "OFFSET": weight.offset,
        "MINIMUM": weight.minimum_OB is not None,
        "OVERLAP": OVERLAP,
        "launch_pdl": OVERLAP,
    }


def rows_of_groups(weight: GroupLinearWeight, row_ids: Tensor | None, dtype: torch.dtype, factor: float) -> Tensor:
    """Rows of the matrix, or all of it, rounded to ``dtype``, times ``factor``. Ids are not checked."""
    num_rows = weight.shape[0] if row_ids is None else row_ids.shape[0]
    y = torch.empty(num_rows, weight.shape[1], dtype=dtype, device=weight.codes_OC.device)
    rows = 1 if row_ids is not None else 4
    _rows[(triton.cdiv(num_rows, rows), triton.cdiv(weight.shape[1], 32 * GROUP))](
        row_ids if row_ids is not None else weight.codes_OC,
        weight.codes_OC,
        weight.scale_OB,
        weight.minimum_OB if weight.minimum_OB is not None else weight.scale_OB,
        y,
        num_rows,
        factor,
        N=rows,
        S=32,
        LISTED=row_ids is not None,
        num_warps=4,
        # A product and a sum that became one operation would round once: not what the format's reference does.
        enable_fp_fusion=False,
        **_form(weight),
    )
    return y


def linear_of_groups(x_TI: Tensor, weight: GroupLinearWeight, bias_O: Tensor | None) -> Tensor:
    """As ops.linear."""
    num_tokens, num_outputs = x_TI.shape[0], weight.shape[0]
    if num_tokens > TILED_TOKENS:
        return F.linear(x_TI, rows_of_groups(weight, None, x_TI.dtype, 1.0), bias_O)
    y_TO = torch.empty(num_tokens, num_outputs, dtype=x_TI.dtype, device=x_TI.device)
    arguments = (
        x_TI,
        weight.codes_OC,
        weight.scale_OB,
        weight.minimum_OB if weight.minimum_OB is not None else weight.scale_OB,
        bias_O if bias_O is not None else x_TI,
        y_TO,
        x_TI.stride(0),
        num_tokens,
        num_outputs,
    )
    form = _form(weight) | {"BIAS": bias_O is not None, "num_warps": 4}
    if num_tokens <= SUMMED_TOKENS and form["GROUPS"] % SUMMED_GROUPS == 0:
        outputs, tokens = 4, power_of_2(num_tokens)
        grid = (triton.cdiv(num_outputs, outputs),)
        summed_tokens_of_groups[grid](*arguments, M=tokens, N=outputs, S=SUMMED_GROUPS, **form)
    else:
        outputs, groups = (64, 4) if num_outputs >= MANY_OUTPUTS else (32, 8)
        grid = (triton.cdiv(num_outputs, outputs),)
        tiled_tokens_of_groups[grid](*arguments, M=TILED_TOKENS, N=outputs, S=groups, num_stages=3, **form)
    return y_TO
