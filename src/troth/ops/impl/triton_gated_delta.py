"""The gated delta rule by Triton kernels: tokens of answers one after another, their states in registers.

A program has one row, one value head and TILE values of each of its state's rows; it walks the row's tokens. Prompts go
to ``triton_gated_delta_chunk.py``. The same compiled code computes single tokens and drafts, so that they give the same
bits. Legend: as ``ops/gated_delta.py``; BD is D or the next power of 2.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.gated_delta import Decay, gated_delta
from troth.ops.impl.triton import power_of_2, takes
from troth.ops.impl.triton_delta_gates import log_decay, recalled, unit
from troth.ops.impl.triton_elementary import sigmoid
from troth.ops.impl.triton_gated_delta_chunk import prompts
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.rows import Rows

TILE: Final = 32
WARPS: Final = 1
"""128 numbers of a state of 128 keys for each thread of one warp, which adds them up without waiting for others. 32
rows of 32 heads take 45 us on an H200, tiles of 16 73, of 8 91; one row takes 3.6, 3.1 and 3.5. More warps were no
faster."""


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["row_R", "recall_R"])
def _recall(
    state: tl.tensor,
    trail: tl.tensor,
    row_R: tl.tensor,
    recall_R: tl.tensor,
    first_row: tl.tensor,
    L: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Before rows write new drafts to their trails: what they recall, taken into their states."""
    await_inputs(OVERLAP)
    r, head = tl.program_id(0) + first_row, tl.program_id(1)
    d, e = tl.arange(0, BD), tl.program_id(2) * TILE + tl.arange(0, TILE)
    row, count = tl.load(row_R + r).to(tl.int64), tl.load(recall_R + r).to(tl.int32)
    at = state + ((row * H + head) * D + d[:, None]) * E + e[None, :]
    inside = (d < D)[:, None] & (e < E)[None, :] & (count > 0)
    kept = trail + row * L * (G * D + H * E + H)
    s = recalled(tl.load(at, mask=inside, other=0.0), kept, count, head // (H // G), head, d, e, G, H, D, E)
    tl.store(at, s, mask=inside)


@triton.jit(
    do_not_specialize=["num_single"],
    do_not_specialize_on_alignment=["row_R", "query_start_R1", "context_len_R", "recall_R"],
)
def _tokens(
    qkv: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    state: tl.tensor,
    trail: tl.tensor,
    out: tl.tensor,
    row_R: tl.tensor,
    query_start_R1: tl.tensor,
    context_len_R: tl.tensor,
    recall_R: tl.tensor,
    gate_stride: tl.tensor,
    num_single: tl.tensor,
    scale: tl.tensor,
    RECALLS: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    r, head = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, BD), tl.program_id(2) * TILE + tl.arange(0, TILE)
    row, key_head = tl.load(row_R + r).to(tl.int64), head // (H // G)
    begin, end, context = tl.load(query_start_R1 + r), tl.load(query_start_R1 + r + 1), tl.load(context_len_R + r)
    # Padding has no context, and no row of its own.
    real = context > 0
    at = state + ((tl.where(real, row, 0) * H + head) * D + d[:, None]) * E + e[None, :]
    inside = (d < D)[:, None] & (e < E)[None, :] & real
    s = tl.load(at, mask=inside & (context > end - begin), other=0.0)
    kept = trail + tl.where(real, row, 0) * L * (G * D + H * E + H)
    if RECALLS:
        count = tl.where(real & (r < num_single), tl.load(recall_R + r), 0).to(tl.int32)
        s = recalled(s, kept, count, key_head, head, d, e, G, H, D, E)
    rate_h, bias_h = tl.load(rate + head), tl.load(bias + head)
    for i in range(end - begin):
        token = begin.to(tl.int64) + i
        x = qkv + token * (2 * G * D + H * E)
        q = unit(tl.load(x + key_head * D + d, mask=d < D, other=0.0).to(tl.float32)) * scale
        k = unit(tl.load(x + (G + key_head) * D + d, mask=d < D, other=0.0).to(tl.float32))
        v = tl.load(x + 2 * G * D + head * E + e, mask=e < E, other=0.0).to(tl.float32)
        gate = token * gate_stride + head
        a = tl.exp(log_decay(tl.load(decay + gate).to(tl.float32), rate_h, bias_h))
        b = sigmoid(tl.load(beta + gate).to(tl.float32))
        known = tl.sum(s * k[:, None], axis=0)
        u = b * (v - a * known)
        s = tl.fma(k[:, None], u[None, :], s * a)
        y = tl.where(real, tl.sum(s * q[:, None], axis=0), 0.0)
        tl.store(out + (token * H + head) * E + e, y.to(out.dtype.element_ty), mask=e < E)
        if i == 0:
            tl.store(at, s, mask=inside)
        else:
            draft = kept + (i - 1) * (G * D + H * E + H)
            first = (tl.program_id(2) == 0) & (head % (H // G) == 0)
            tl.store(draft + key_head * D + d, k, mask=(d < D) & first)
            tl.store(draft + G * D + head * E + e, u, mask=e < E)
            tl.store(draft + G * D + H * E + head, a, mask=tl.program_id(2) == 0)


def _takes(
    qkv_TW: Tensor,
    num_key_heads: int,
    beta_TH: Tensor,
    decay_TH: Tensor,
    decay: Decay,
    state_NHDE: Tensor,
    trail_NLF: Tensor,
    rows: Rows,
) -> bool:
    return (
        takes(qkv_TW)
        and qkv_TW.is_contiguous()
        and beta_TH.stride() == decay_TH.stride()
        and beta_TH.stride(-1) == 1
        and state_NHDE.is_contiguous()
        and trail_NLF.is_contiguous()
    )


@gated_delta.provider("triton", supports=_takes)
def gated_delta_triton(
    qkv_TW: Tensor,
    num_key_heads: int,
    beta_TH: Tensor,
    decay_TH: Tensor,
    decay: Decay,
    state_NHDE: Tensor,
    trail_NLF: Tensor,
    rows: Rows,
) -> Tensor:
    """As ops.gated_delta."""
    _, num_heads, key_dim, value_dim = state_NHDE.shape
    out_THE = torch.empty((qkv_TW.shape[0], num_heads, value_dim), dtype=qkv_TW.dtype, device=qkv_TW.device)
    recall_R = rows.row_R if rows.recall_R is None else rows.recall_R
    sizes = {"L": trail_NLF.shape[1], "G": num_key_heads, "H": num_heads, "D": key_dim, "E": value_dim}
    widths = {"BD": power_of_2(key_dim), "OVERLAP": OVERLAP, "launch_pdl": OVERLAP}
    tiles, num_answers = triton.cdiv(value_dim, TILE), rows.num_single + rows.num_verifies
    if rows.num_verifies and rows.recall_R is not None:
        _recall[(rows.num_verifies, num_heads, tiles)](
            state_NHDE, trail_NLF, rows.row_R, recall_R, rows.num_single, TILE=TILE, num_warps=WARPS, **sizes, **widths
        )
    if num_answers:
        _tokens[(num_answers, num_heads, tiles)](
            qkv_TW,
            beta_TH,
            decay_TH,
            decay.rate_H,
            decay.bias_H,
            state_NHDE,
            trail_NLF,
            out_THE,
            rows.row_R,
            rows.query_start_R1,
            rows.context_len_R,
            recall_R,
            beta_TH.stride(0),
            rows.num_single,
            key_dim**-0.5,
            RECALLS=rows.recall_R is not None,
            TILE=TILE,
            num_warps=WARPS,
            **sizes,
            **widths,
        )
    if num_answers < rows.num_rows:
        prompts(qkv_TW, num_key_heads, (beta_TH, decay_TH, decay), state_NHDE, trail_NLF, rows, out_THE)
    return out_THE
