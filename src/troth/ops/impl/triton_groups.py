"""Weights of 4 or 8 bits in groups of 32 with a scale each, multiplied by Triton kernels without being unpacked first.

GGUF's Q8_0, Q4_0 and Q4_1 (layouts: ggml-common.h) are taken apart once, at load: codes in one tensor, scales in
another, minimums in a third. A few tokens are multiplied by numbers made in registers; for many, the whole matrix is
made in memory once per product and goes to cuBLAS.
Legend: T tokens, I inputs, O outputs, C words of codes of a row, B = I / 32 groups; M, N, S are a tile's tokens,
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
from troth.ops.impl.triton import FLOATS, INTERPRETED
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.linear import RawWeight
from troth.weights.quantized import QuantTensor

GROUP: Final = 32
TILED_TOKENS: Final = 16
"""More go to cuBLAS."""
MANY_OUTPUTS: Final = 16384
PACK_VALUES: Final = 2**24
"""Codes in hand at once while packing."""
HEADERS: Final = {GgmlType.Q8_0: 2, GgmlType.Q4_0: 2, GgmlType.Q4_1: 4}
"""Bytes before the codes of a block: its scale, then its minimum if it has one."""
OFFSETS: Final = {GgmlType.Q8_0: 128, GgmlType.Q4_0: 8, GgmlType.Q4_1: 0}


@dataclass(frozen=True, slots=True, eq=False)
class GroupLinearWeight:
    """value = scale * (code - offset) + minimum.

    A group's codes fill Q words of 32 bits: those of values q, q + Q, q + 2 Q ... of the group lie in word q, the first
    in its lowest bits. So the same bits of all its words belong to values side by side.
    """

    words_OC: Tensor
    """int32 [O, B Q]; Q is 4 or 8, as the bits of a code."""
    scale_OB: Tensor
    """float16."""
    minimum_OB: Tensor | None
    """float16; None: 0."""
    bits: int
    offset: int
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        parts = (self.words_OC, self.scale_OB, *([] if self.minimum_OB is None else [self.minimum_OB]))
        return sum(part.numel() * part.element_size() for part in parts)


def pack_groups(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> GroupLinearWeight | None:
    """Weights that all lie in one of the formats here; None: they do not."""
    if (device.type == "cuda") == INTERPRETED or dtype not in FLOATS:
        return None
    quantised = [part for part in parts if isinstance(part, QuantTensor)]
    kind = quantised[0].ggml_type if quantised else None
    if kind not in HEADERS or len(quantised) != len(parts) or any(part.ggml_type != kind for part in quantised):
        return None
    inputs, outputs = quantised[0].shape[1], sum(part.shape[0] for part in quantised)
    bits, groups = 8 if kind == GgmlType.Q8_0 else 4, inputs // GROUP
    words_OC = torch.empty(outputs, groups * bits, dtype=torch.int32, device=device)
    header = torch.empty(HEADERS[kind] // 2, outputs, groups, dtype=torch.float16, device=device)
    step, first = max(1, PACK_VALUES // inputs), 0
    for part in quantised:
        for rows in part.raw.split(step):
            end = first + rows.shape[0]
            blocks = rows.to(device).view(len(rows), groups, -1)
            header[:, first:end] = blocks[:, :, : HEADERS[kind]].contiguous().view(torch.float16).permute(2, 0, 1)
            words_OC[first:end] = _words(blocks[:, :, HEADERS[kind] :], bits)
            first = end
    return GroupLinearWeight(
        words_OC=words_OC,
        scale_OB=header[0],
        minimum_OB=header[1] if kind == GgmlType.Q4_1 else None,
        bits=bits,
        offset=OFFSETS[kind],
        shape=(outputs, inputs),
    )


def _words(codes: Tensor, bits: int) -> Tensor:
    """int32 [O, B Q] of GGUF's codes, uint8: 8 bits with a sign, or 4, value j in byte j's low half, j + 16 above."""
    values = codes.long() ^ 128 if bits == 8 else torch.cat((codes & 15, codes >> 4), dim=-1).long()
    planes = values.unflatten(-1, (32 // bits, bits)) << (bits * torch.arange(32 // bits, device=codes.device))[:, None]
    # The top bit of a word is the sign of an int32.
    return (planes.sum(dim=2) << 32 >> 32).int().flatten(1)


@triton.jit
def _codes(words: tl.tensor, K: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr) -> tl.tensor:
    """float32, as ``words``: (code - OFFSET) 2^p of code K of each word, where p = BITS (K mod 16 / BITS).

    The bits become the low end of 2^23's mantissa where they lie: one operation, and one to take 2^23 away.
    """
    HALF: tl.constexpr = 16 // BITS
    PLACE: tl.constexpr = BITS * (K % HALF)
    MASK: tl.constexpr = ((1 << BITS) - 1) << PLACE
    ZERO: tl.constexpr = 8388608 + OFFSET * (1 << PLACE)
    if K >= HALF:
        words = words >> 16
    return ((words & MASK) | 0x4B000000).to(tl.float32, bitcast=True) - ZERO


@triton.jit
def _unplaced(x: tl.tensor, K: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """x 2^-p, with p as for ``_codes``: exact."""
    HALF: tl.constexpr = 16 // BITS
    FACTOR: tl.constexpr = 1.0 / (1 << (BITS * (K % HALF)))
    return x * FACTOR


@triton.jit
def summed_token_of_groups(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    num_outputs: tl.tensor,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = w x + bias of one token: a program computes N outputs, S groups of inputs at a time."""
    n, s, q = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, S), tl.arange(0, BITS)
    inside = n < num_outputs
    row_at = tl.where(inside, n, 0).to(tl.int64)[:, None] * GROUPS + s[None, :]
    x_at = x + s[:, None] * 32 + q[None, :]
    acc = tl.zeros([N, S], tl.float32)
    for first in tl.static_range(0, GROUPS, S):
        # Groups past a row's end count as zeros; where none are, this is known beforehand.
        held = (first + s < GROUPS) if first + S > GROUPS else (s >= 0)
        word_at = words + (row_at + first)[:, :, None] * BITS + q[None, None, :]
        word = tl.load(word_at, mask=held[None, :, None], other=0)
        scale = tl.load(scales + row_at + first, mask=held[None, :], other=0.0).to(tl.float32)
        # Weights never change: the first of them come before the token is there.
        if first == 0:
            await_inputs(OVERLAP)
        part = tl.zeros([N, S, BITS], tl.float32)
        x_sum = tl.zeros([S, BITS], tl.float32)
        for k in tl.static_range(32 // BITS):
            x_k = tl.load(x_at + first * 32 + k * BITS, mask=held[:, None], other=0.0).to(tl.float32)
            part += _codes(word, k, BITS, OFFSET) * _unplaced(x_k, k, BITS)[None, :, :]
            x_sum += x_k
        acc += tl.sum(part, axis=2) * scale
        if MINIMUM:
            minimum = tl.load(minimums + row_at + first, mask=held[None, :], other=0.0).to(tl.float32)
            acc += minimum * tl.sum(x_sum, axis=1)[None, :]
    total = tl.sum(acc, axis=1)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def tiled_tokens_of_groups(
    x: tl.tensor,
    words: tl.tensor,
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
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = x w^T + bias for M tokens at most: a program computes N outputs of all tokens, S groups at a time."""
    await_inputs(OVERLAP)
    m, n, q = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, BITS)
    inside, wanted = n < num_outputs, m < num_tokens
    flat = tl.arange(0, S * BITS)
    acc = tl.zeros([M, N], tl.float32)
    for first in range(0, GROUPS, S):
        group = first + tl.arange(0, S)
        held = inside[:, None] & (group < GROUPS)[None, :]
        at = n.to(tl.int64)[:, None] * GROUPS + group[None, :]
        word = tl.load(words + at[:, :, None] * BITS + q[None, None, :], mask=held[:, :, None], other=0)
        scale = tl.load(scales + at, mask=held, other=0.0).to(tl.float32)[:, :, None]
        i = (first + flat // BITS) * 32 + flat % BITS
        x_at = x + m[:, None] * x_stride + i[None, :]
        x_inside = wanted[:, None] & (i < GROUPS * 32)[None, :]
        for k in tl.static_range(32 // BITS):
            x_k = tl.load(x_at + k * BITS, mask=x_inside, other=0.0)
            w = _unplaced(_codes(word, k, BITS, OFFSET), k, BITS) * scale
            if MINIMUM:
                w += tl.load(minimums + at, mask=held, other=0.0).to(tl.float32)[:, :, None]
            w_k = tl.reshape(w, [N, S * BITS]).to(x_k.dtype)
            acc = tl.dot(x_k, tl.trans(w_k), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_at = y + m[:, None] * num_outputs + n[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=wanted[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _rows(
    row_ids: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    y: tl.tensor,
    num_rows: tl.tensor,
    factor: tl.tensor,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr,
    LISTED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """y = the rows of ``row_ids``, or all in order if not LISTED, as numbers, times ``factor`` after rounding."""
    await_inputs(OVERLAP)
    n, q = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, BITS)
    group = tl.program_id(1) * S + tl.arange(0, S)
    inside = n < num_rows
    row = tl.load(row_ids + n, mask=inside, other=0) if LISTED else n.to(tl.int64)
    held = inside[:, None] & (group < GROUPS)[None, :]
    at = row[:, None] * GROUPS + group[None, :]
    word = tl.load(words + at[:, :, None] * BITS + q[None, None, :], mask=held[:, :, None], other=0)
    scale = tl.load(scales + at, mask=held, other=0.0).to(tl.float32)[:, :, None]
    y_at = y + (n.to(tl.int64)[:, None] * GROUPS + group[None, :])[:, :, None] * 32 + q[None, None, :]
    kind = y.dtype.element_ty
    for k in tl.static_range(32 // BITS):
        value = _unplaced(_codes(word, k, BITS, OFFSET), k, BITS) * scale
        if MINIMUM:
            value += tl.load(minimums + at, mask=held, other=0.0).to(tl.float32)[:, :, None]
        tl.store(y_at + k * BITS, (value.to(kind).to(tl.float32) * factor).to(kind), mask=held[:, :, None])


def _form(weight: GroupLinearWeight) -> dict[str, Any]:
    return {
        "GROUPS": weight.shape[1] // GROUP,
        "BITS": weight.bits,
        "OFFSET": weight.offset,
        "MINIMUM": weight.minimum_OB is not None,
        "OVERLAP": OVERLAP,
        "launch_pdl": OVERLAP,
    }


def rows_of_groups(weight: GroupLinearWeight, row_ids: Tensor | None, dtype: torch.dtype, factor: float) -> Tensor:
    """Rows of the matrix, or all of it, rounded to ``dtype``, times ``factor``. Ids are not checked."""
    num_rows = weight.shape[0] if row_ids is None else row_ids.shape[0]
    y = torch.empty(num_rows, weight.shape[1], dtype=dtype, device=weight.words_OC.device)
    rows = 1 if row_ids is not None else 4
    _rows[(triton.cdiv(num_rows, rows), triton.cdiv(weight.shape[1], 32 * GROUP))](
        row_ids if row_ids is not None else weight.words_OC,
        weight.words_OC,
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
        weight.words_OC,
        weight.scale_OB,
        weight.minimum_OB if weight.minimum_OB is not None else weight.scale_OB,
        bias_O if bias_O is not None else x_TI,
        y_TO,
    )
    form = _form(weight) | {"BIAS": bias_O is not None}
    if num_tokens == 1:
        outputs, groups, num_warps = _summed_tile(weight)
        grid = (triton.cdiv(num_outputs, outputs),)
        summed_token_of_groups[grid](*arguments, num_outputs, N=outputs, S=groups, num_warps=num_warps, **form)
    else:
        outputs, groups = (64, 4) if num_outputs >= MANY_OUTPUTS else (32, 8)
        grid = (triton.cdiv(num_outputs, outputs),)
        sizes = (x_TI.stride(0), num_tokens, num_outputs)
        tiled_tokens_of_groups[grid](
            *arguments, *sizes, M=TILED_TOKENS, N=outputs, S=groups, num_warps=4, num_stages=3, **form
        )
    return y_TO


def _summed_tile(weight: GroupLinearWeight) -> tuple[int, int, int]:
    """Outputs and groups of a tile, and warps.

    On an H200, 8 bits: 3.0 TB/s for 24576 x 4096 and 2.5 for smaller matrices, where 128 groups for 4 warps reach 2.5
    and 2.0. 4 bits: 1.6 and 1.4 TB/s, bound by instructions, eight for each code.
    """
    if weight.bits == 8:
        return 2, 32, 1
    return (4, 128, 4) if weight.shape[1] % (128 * GROUP) == 0 else (4, 32, 1)
