"""The gated delta rule over prompts: CHUNK tokens at a time, by products of small matrices.

With c_i the sum of log decays of a chunk up to token i, its corrections u obey (1 + A) u = b v - b e^c (K S), where
A_ij = b_i e^(c_i - c_j) k_i . k_j below the diagonal (Yang et al. 2024; ``torch_gated_delta.py``). One kernel inverts
1 + A for all chunks at once, a second walks each row's chunks with the state in registers. Chunks are short: rows of
prompts have few heads to spread over a GPU, and inverses of 16 rows need no products of their own.
Legend: as ``ops/gated_delta.py``; C tokens of a chunk, BD is D or the next power of 2.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.gated_delta import Decay
from troth.ops.impl.triton import INTERPRETED, power_of_2
from troth.ops.impl.triton_delta_gates import log_decay, recalled, unit_rows
from troth.ops.impl.triton_elementary import sigmoid
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.rows import Rows

CHUNK: Final = 16
TILE: Final = 32
WARPS: Final = 4
"""Values of each row of a state that one program has, and its warps. 2,048 tokens of 32 heads take 1.18 ms on an H200;
of eight other choices, chunks of 32 tokens among them, one was as fast (tiles of 64, 8 warps), the others took 1.5 to
4.0."""
PRECISION: Final = "ieee" if INTERPRETED else "tf32x3"
"""Of products: three of tensor cores make one that is as good as float32."""


@triton.jit
def _gates(
    beta: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    token_C: tl.tensor,
    inside_C: tl.tensor,
    gate_stride: tl.tensor,
    head: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Learning rates and sums of log decays, float32 [C]; 0 and no change past the end."""
    at = token_C * gate_stride + head
    b = sigmoid(tl.load(beta + at, mask=inside_C, other=0.0).to(tl.float32))
    x = tl.load(decay + at, mask=inside_C, other=0.0).to(tl.float32)
    logs = log_decay(x, tl.load(rate + head), tl.load(bias + head))
    return tl.where(inside_C, b, 0.0), tl.cumsum(tl.where(inside_C, logs, 0.0), axis=0)


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=["query_start_R1"])
def _invert(
    qkv: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    inverse: tl.tensor,
    query_start_R1: tl.tensor,
    gate_stride: tl.tensor,
    first_row: tl.tensor,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """(1 + A)^-1 of one chunk and head, float32; row i at token i."""
    await_inputs(OVERLAP)
    r, head = tl.program_id(0) + first_row, tl.program_id(2)
    begin, end = tl.load(query_start_R1 + r), tl.load(query_start_R1 + r + 1)
    first = begin + tl.program_id(1) * C
    if first < end:
        i, d = tl.arange(0, C), tl.arange(0, BD)
        token, inside = (first + i).to(tl.int64), first + i < end
        at = qkv + token[:, None] * (2 * G * D + H * E) + (G + head // (H // G)) * D + d[None, :]
        k = unit_rows(tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32))
        b, c = _gates(beta, decay, rate, bias, token, inside, gate_stride, head)
        below = i[:, None] > i[None, :]
        between = tl.exp(tl.where(below, c[:, None] - c[None, :], 0.0))
        a = tl.where(below, b[:, None] * between * tl.dot(k, tl.trans(k), input_precision=PRECISION), 0.0)
        t = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for j in tl.static_range(1, C):
            row = tl.sum(tl.where(i[:, None] == j, a, 0.0), axis=0)
            known = tl.sum(row[:, None] * t, axis=0)
            t = tl.where(i[:, None] == j, t - known[None, :], t)
        tl.store(inverse + (token[:, None] * H + head) * C + i[None, :], t, mask=inside[:, None])


@triton.jit(
    do_not_specialize=["first_row"],
    do_not_specialize_on_alignment=["row_R", "query_start_R1", "context_len_R", "recall_R"],
)
def _walk(
    qkv: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    state: tl.tensor,
    trail: tl.tensor,
    inverse: tl.tensor,
    out: tl.tensor,
    row_R: tl.tensor,
    query_start_R1: tl.tensor,
    context_len_R: tl.tensor,
    recall_R: tl.tensor,
    gate_stride: tl.tensor,
    first_row: tl.tensor,
    scale: tl.tensor,
    RECALLS: tl.constexpr,
    L: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    TILE: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    r, head = tl.program_id(0) + first_row, tl.program_id(1)
    i, d, e = tl.arange(0, C), tl.arange(0, BD), tl.program_id(2) * TILE + tl.arange(0, TILE)
    row, key_head = tl.load(row_R + r).to(tl.int64), head // (H // G)
    begin, end = tl.load(query_start_R1 + r), tl.load(query_start_R1 + r + 1)
    here = state + ((row * H + head) * D + d[:, None]) * E + e[None, :]
    held = (d < D)[:, None] & (e < E)[None, :]
    s = tl.load(here, mask=held & (tl.load(context_len_R + r) > end - begin), other=0.0)
    if RECALLS:
        kept = trail + row * L * (G * D + H * E + H)
        s = recalled(s, kept, tl.load(recall_R + r).to(tl.int32), key_head, head, d, e, G, H, D, E)
    for chunk in range(tl.cdiv(end - begin, C)):
        token = begin.to(tl.int64) + chunk * C + i
        inside = token < end
        at = qkv + token[:, None] * (2 * G * D + H * E)
        both = inside[:, None] & (d < D)[None, :]
        q = unit_rows(tl.load(at + key_head * D + d[None, :], mask=both, other=0.0).to(tl.float32)) * scale
        k = unit_rows(tl.load(at + (G + key_head) * D + d[None, :], mask=both, other=0.0).to(tl.float32))
        wanted = inside[:, None] & (e < E)[None, :]
        v = tl.load(at + 2 * G * D + head * E + e[None, :], mask=wanted, other=0.0).to(tl.float32)
        b, c = _gates(beta, decay, rate, bias, token, inside, gate_stride, head)
        t = tl.load(inverse + (token[:, None] * H + head) * C + i[None, :], mask=inside[:, None], other=0.0)
        right = b[:, None] * v - tl.dot(k * (b * tl.exp(c))[:, None], s, input_precision=PRECISION)
        u = tl.dot(t, right, input_precision=PRECISION)
        seen = i[:, None] >= i[None, :]
        between = tl.exp(tl.where(seen, c[:, None] - c[None, :], 0.0))
        scores = tl.where(seen, between * tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)
        y = tl.dot(q * tl.exp(c)[:, None], s, input_precision=PRECISION)
        y += tl.dot(scores, u, input_precision=PRECISION)
        tl.store(out + (token[:, None] * H + head) * E + e[None, :], y.to(out.dtype.element_ty), mask=wanted)
        total = tl.min(c, axis=0)  # log decays are at most 0: the last sum is the least
        to_end = tl.trans(k * tl.exp(total - c)[:, None])
        s = s * tl.exp(total) + tl.dot(to_end, u, input_precision=PRECISION)
    tl.store(here, s, mask=held)


def prompts(
    qkv_TW: Tensor,
    num_key_heads: int,
    gates: tuple[Tensor, Tensor, Decay],
    state_NHDE: Tensor,
    trail_NLF: Tensor,
    rows: Rows,
    out_THE: Tensor,
) -> None:
    """Compute the rows behind those that continue answers into ``out``, as ops.gated_delta.

    Args:
        gates: beta, decay, and the form of the latter.
    """
    _, num_heads, key_dim, value_dim = state_NHDE.shape
    beta_TH, decay_TH, decay = gates
    first_row = rows.num_single + rows.num_verifies
    num_rows = rows.num_rows - first_row
    inverse_THC = torch.empty((qkv_TW.shape[0], num_heads, CHUNK), dtype=torch.float32, device=qkv_TW.device)
    sizes = {"G": num_key_heads, "H": num_heads, "D": key_dim, "E": value_dim, "BD": max(16, power_of_2(key_dim))}
    form = {"C": CHUNK, "PRECISION": PRECISION, "OVERLAP": OVERLAP, "launch_pdl": OVERLAP}
    heads = (qkv_TW, beta_TH, decay_TH, decay.rate_H, decay.bias_H)
    _invert[(num_rows, triton.cdiv(rows.max_new, CHUNK), num_heads)](
        *heads,
        inverse_THC,
        rows.query_start_R1,
        beta_TH.stride(0),
        first_row,
        num_warps=1,
        **sizes,
        **form,
    )
    _walk[(num_rows, num_heads, triton.cdiv(value_dim, TILE))](
        *heads,
        state_NHDE,
        trail_NLF,
        inverse_THC,
        out_THE,
        rows.row_R,
        rows.query_start_R1,
        rows.context_len_R,
        rows.row_R if rows.recall_R is None else rows.recall_R,
        beta_TH.stride(0),
        first_row,
        key_dim**-0.5,
        RECALLS=rows.recall_R is not None,
        L=trail_NLF.shape[1],
        TILE=TILE,
        num_warps=WARPS,
        **sizes,
        **form,
    )
