"""The short convolution by a Triton kernel: one program per row, channels and tokens next to one another.

The program of a row's first tokens also writes its state and trail: nobody else reads the old ones.
Legend: as ``ops/short_conv.py``.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.impl.triton import takes
from troth.ops.impl.triton_elementary import sigmoid
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.rows import Rows
from troth.ops.short_conv import short_conv

TOKENS: Final = 16
"""Of one program; more than a row with drafts has."""
CHANNELS: Final = 256


@triton.jit
def _input(
    x: tl.tensor,
    state: tl.tensor,
    trail: tl.tensor,
    index: tl.tensor,
    recalls: tl.tensor,
    known: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    J: tl.constexpr,
) -> tl.tensor:
    """Input ``index`` of a row, float32: of this step from 0 on, before it those its state and trail remember."""
    at = J + index + recalls
    new = tl.load(x + index.to(tl.int64) * stride, mask=inside & (index >= 0), other=0.0).to(tl.float32)
    old = tl.load(state + at * channels, mask=inside & (index < 0) & (at < J) & known, other=0.0)
    drafted = tl.load(trail + (at - J) * channels, mask=inside & (index < 0) & (at >= J) & known, other=0.0)
    return new + old + drafted


@triton.jit(
    do_not_specialize=["num_single", "num_answers"],
    do_not_specialize_on_alignment=["row_R", "query_start_R1", "context_len_R", "recall_R"],
)
def _conv(
    x: tl.tensor,
    weight: tl.tensor,
    state: tl.tensor,
    trail: tl.tensor,
    y: tl.tensor,
    row_R: tl.tensor,
    query_start_R1: tl.tensor,
    context_len_R: tl.tensor,
    recall_R: tl.tensor,
    stride: tl.tensor,
    channels: tl.tensor,
    num_single: tl.tensor,
    num_answers: tl.tensor,
    RECALLS: tl.constexpr,
    SILU: tl.constexpr,
    L: tl.constexpr,
    J: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    r, block = tl.program_id(0), tl.program_id(1)
    begin, end, context = tl.load(query_start_R1 + r), tl.load(query_start_R1 + r + 1), tl.load(context_len_R + r)
    count = end - begin
    if block * TOKENS < count:
        c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
        inside = c < channels
        row = tl.where(context > 0, tl.load(row_R + r), 0).to(tl.int64)  # padding has no context, and no row
        inputs = x + begin.to(tl.int64) * stride + c
        states = state + row * J * channels + c
        drafts = trail + row * L * channels + c
        known = context > count
        recalls = context * 0
        if RECALLS:
            recalls = tl.where(known, tl.load(recall_R + r), 0).to(tl.int32)
        for t in range(block * TOKENS, tl.minimum(count, block * TOKENS + TOKENS)):
            total = tl.zeros([CHANNELS], tl.float32)
            for k in tl.static_range(J + 1):
                w = tl.load(weight + k * channels + c, mask=inside, other=0.0)
                value = _input(
                    inputs, states, drafts, count * 0 + t - J + k, recalls, known, inside, stride, channels, J
                )
                total += w * value
            out = total
            if SILU:
                out = total * sigmoid(total)
            at = y + (begin + t).to(tl.int64) * channels + c
            tl.store(at, out.to(y.dtype.element_ty), mask=inside)
        if (block == 0) & (context > 0):
            num_fed = tl.where((r >= num_single) & (r < num_answers), 1, count)
            # Upwards: each entry comes from one further on, or from this step.
            for j in tl.static_range(J):
                value = _input(inputs, states, drafts, num_fed - J + j, recalls, known, inside, stride, channels, J)
                tl.store(states + j * channels, value, mask=inside)
            for t in range(num_fed, count):
                draft = tl.load(inputs + (count * 0 + t).to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)
                tl.store(drafts + (t - num_fed) * channels, draft, mask=inside)


def _takes(
    x_TC: Tensor, weight_KC: Tensor, state_NJC: Tensor, trail_NLC: Tensor, rows: Rows, silu: bool = True
) -> bool:
    return takes(x_TC) and x_TC.stride(-1) == 1 and state_NJC.is_contiguous() and trail_NLC.is_contiguous()


@short_conv.provider("triton", supports=_takes)
def short_conv_triton(
    x_TC: Tensor, weight_KC: Tensor, state_NJC: Tensor, trail_NLC: Tensor, rows: Rows, silu: bool = True
) -> Tensor:
    """As ops.short_conv."""
    num_tokens, channels = x_TC.shape
    y_TC = torch.empty((num_tokens, channels), dtype=x_TC.dtype, device=x_TC.device)
    _conv[(rows.num_rows, triton.cdiv(rows.max_new, TOKENS), triton.cdiv(channels, CHANNELS))](
        x_TC,
        weight_KC,
        state_NJC,
        trail_NLC,
        y_TC,
        rows.row_R,
        rows.query_start_R1,
        rows.context_len_R,
        rows.row_R if rows.recall_R is None else rows.recall_R,
        x_TC.stride(0),
        channels,
        rows.num_single,
        rows.num_single + rows.num_verifies,
        RECALLS=rows.recall_R is not None,
        SILU=silu,
        L=trail_NLC.shape[1],
        J=weight_KC.shape[0] - 1,
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
        num_warps=2,
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
    )
    return y_TC
