"""Weights of 4 or 8 bits in groups of 32 with a scale each, as Triton kernels keep them: packed at load, made numbers.

GGUF's Q8_0, Q4_0 and Q4_1 (layouts: ggml-common.h) are taken apart once: codes in one tensor, scales in another,
minimums in a third, so that a tile of outputs lies side by side in memory. Next: ``triton_groups_product.py``.
Legend: O outputs, I inputs, K blocks of a row; N, S are a tile's rows and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.artifact.ggml_types import GgmlType
from troth.ops.impl.triton import FLOATS, INTERPRETED
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.linear import RawWeight
from troth.weights.quantized import QuantTensor

GROUP: Final = 32
WORDS: Final = 16
"""Of a block."""
PACK_VALUES: Final = 2**24
"""Codes in hand at once while packing."""
HEADERS: Final = {GgmlType.Q8_0: 2, GgmlType.Q4_0: 2, GgmlType.Q4_1: 4}
"""Bytes before the codes of a block of GGUF: its scale, then its minimum if it has one."""
OFFSETS: Final = {GgmlType.Q8_0: 128, GgmlType.Q4_0: 8, GgmlType.Q4_1: 0}
"""Of ``GroupLinearWeight``; codes of Q8_0, which have a sign, are kept with 128 added."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupLinearWeight:
    """value = scale * (code - offset) + minimum.

    A block holds 16 / bits groups, P, in 16 words of 32 bits. Word w holds codes 2 w and 2 w + 1 of each of them: those
    of group p in bits p * bits of its low and of its high half. So one operation makes two neighbours numbers. The
    codes of groups past a row's end are 0, and so are their scales.
    """

    words_KOW: Tensor
    """int32 [K, O, 16]."""
    scales_KO: Tensor
    """int64 or int32 [K, O]: P numbers of float16 each, the first lowest."""
    minimums_KO: Tensor | None
    """The same; None: 0."""
    bits: int
    offset: int
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        parts = (self.words_KOW, self.scales_KO, *([] if self.minimums_KO is None else [self.minimums_KO]))
        return sum(part.numel() * part.element_size() for part in parts)


def pack_groups(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> GroupLinearWeight | None:
    """Weights that all lie in one of the formats here, copied to ``device``; None: they do not."""
    if (device.type == "cuda") == INTERPRETED or dtype not in FLOATS:
        return None
    quantised = [part for part in parts if isinstance(part, QuantTensor)]
    kind = quantised[0].ggml_type if quantised else None
    if kind not in HEADERS or len(quantised) != len(parts):
        return None
    if any(part.ggml_type != kind or part.inputs is not None for part in quantised):
        return None
    inputs, outputs = quantised[0].shape[1], sum(part.shape[0] for part in quantised)
    bits = 8 if kind == GgmlType.Q8_0 else 4
    groups = 16 // bits
    blocks = triton.cdiv(inputs, groups * GROUP)
    words_KOW = torch.empty(blocks, outputs, WORDS, dtype=torch.int32, device=device)
    headers = torch.empty(HEADERS[kind] // 2, blocks, outputs, groups, dtype=torch.float16, device=device)
    step, first = max(1, PACK_VALUES // inputs), 0
    for part in quantised:
        for rows in part.raw.split(step):
            end = first + len(rows)
            block_bytes = rows.shape[1] * GROUP // inputs
            held = torch.zeros(len(rows), blocks * groups, block_bytes, dtype=torch.uint8, device=device)
            held[:, : inputs // GROUP] = rows.to(device).view(len(rows), inputs // GROUP, -1)
            header = held[:, :, : HEADERS[kind]].contiguous().view(torch.float16).unflatten(1, (blocks, groups))
            headers[:, :, first:end] = header.permute(3, 1, 0, 2)
            words_KOW[:, first:end] = _words(held[:, :, HEADERS[kind] :].unflatten(1, (blocks, groups)), bits)
            first = end
    packed = headers.view(torch.int64 if groups == 4 else torch.int32).squeeze(-1)
    return GroupLinearWeight(
        words_KOW=words_KOW,
        scales_KO=packed[0],
        minimums_KO=packed[1] if kind == GgmlType.Q4_1 else None,
        bits=bits,
        offset=OFFSETS[kind],
        shape=(outputs, inputs),
    )


def _words(codes: Tensor, bits: int) -> Tensor:
    """int32 [K, O, 16] of GGUF's codes, uint8 [O, K, P, bytes].

    There they are 8 bits with a sign, or 4: value j in byte j's low half, j + 16 above.
    """
    values = codes.long() ^ 128 if bits == 8 else torch.cat((codes & 15, codes >> 4), dim=-1).long()
    values = values.unflatten(-1, (WORDS, 2))
    places = bits * torch.arange(values.shape[2], device=codes.device)[:, None, None]
    halves = 16 * torch.arange(2, device=codes.device)
    # The top bit of a word is the sign of an int32.
    return ((values << (places + halves)).sum(dim=(2, 4)) << 32 >> 32).int().transpose(0, 1)


@triton.jit
def code_pair(
    words: tl.tensor, P: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """float32, as ``words``: the two codes of group P in each word, minus OFFSET.

    The bits become the low end of 2^23's mantissa: one operation, and one to take 2^23 away.
    """
    MASK: tl.constexpr = (1 << BITS) - 1
    low = words >> (P * BITS)
    high = low >> 16
    first = ((low & MASK) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608 + OFFSET)
    second = ((high & MASK) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608 + OFFSET)
    return first, second


@triton.jit
def header(packed: tl.tensor, P: tl.constexpr) -> tl.tensor:
    """float32, as ``packed``: number P of each."""
    return (packed >> (16 * P)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["row_ids"])
def _rows(
    row_ids: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    y: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    factor: tl.tensor,
    WIDTH: tl.constexpr,
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
    GROUPS: tl.constexpr = 16 // BITS
    n, w, i = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, 16), tl.arange(0, 32)
    block = tl.program_id(1) * S + tl.arange(0, S)
    inside = n < num_rows
    row = tl.load(row_ids + n, mask=inside, other=0) if LISTED else n.to(tl.int64)
    held = inside[:, None] & (block * (GROUPS * 32) < WIDTH)[None, :]
    at = block.to(tl.int64)[None, :] * num_outputs + row[:, None]
    word = tl.load(words + at[:, :, None] * 16 + w[None, None, :], mask=held[:, :, None], other=0)
    scale = tl.load(scales + at, mask=held, other=0)
    if MINIMUM:
        minimum = tl.load(minimums + at, mask=held, other=0)
    y_at = y + n.to(tl.int64)[:, None, None] * WIDTH
    kind = y.dtype.element_ty
    for p in tl.static_range(GROUPS):
        first, second = code_pair(word, p, BITS, OFFSET)
        value = tl.reshape(tl.join(first, second), [N, S, 32]) * header(scale, p)[:, :, None]
        if MINIMUM:
            value += header(minimum, p)[:, :, None]
        column = (block * (GROUPS * 32) + p * 32)[None, :, None] + i[None, None, :]
        number = (value.to(kind).to(tl.float32) * factor).to(kind)
        tl.store(y_at + column, number, mask=inside[:, None, None] & (column < WIDTH))


def form_of(weight: GroupLinearWeight) -> dict[str, Any]:
    """What kernels must know of a weight when they are compiled."""
    return {
        "WIDTH": weight.shape[1],
        "BITS": weight.bits,
        "OFFSET": weight.offset,
        "MINIMUM": weight.minimums_KO is not None,
        "OVERLAP": OVERLAP,
        "launch_pdl": OVERLAP,
    }


def rows_of_groups(weight: GroupLinearWeight, row_ids: Tensor | None, dtype: torch.dtype, factor: float) -> Tensor:
    """Rows of the matrix, or all of it, rounded to ``dtype``, times ``factor``. Ids are not checked."""
    num_rows = weight.shape[0] if row_ids is None else row_ids.shape[0]
    y = torch.empty(num_rows, weight.shape[1], dtype=dtype, device=weight.words_KOW.device)
    rows, blocks = (1, 8) if row_ids is not None else (32, 1)
    _rows[(triton.cdiv(num_rows, rows), triton.cdiv(len(weight.words_KOW), blocks))](
        row_ids if row_ids is not None else weight.words_KOW,
        weight.words_KOW,
        weight.scales_KO,
        weight.minimums_KO if weight.minimums_KO is not None else weight.scales_KO,
        y,
        num_rows,
        weight.shape[0],
        factor,
        N=rows,
        S=blocks,
        LISTED=row_ids is not None,
        num_warps=4,
        # A product and a sum that became one operation would round once: not what the format's reference does.
        enable_fp_fusion=False,
        **form_of(weight),
    )
    return y
