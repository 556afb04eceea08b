"""Attention whose result for a token does not depend on its step: keys are always taken in the same parts and order.

A row's keys are cut at whole multiples of SPLIT, from its first token on; each part is summed by itself, and parts are
merged one after the other. Whether one program takes all parts of a row or several share them, how many tokens a tile
has and where a chunk of a prompt begins changes nothing, bit for bit: what a tile of keys leaves of a token is the same
in all instructions of a matrix unit (``triton_product.py``), and the sum of weights is formed by it, too.
Legend: R rows, K key-value heads, G query heads of each, M queries of a tile, P programs per tile.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.impl.triton import power_of_2
from troth.ops.impl.triton_attention_chunk import row_of_tile
from troth.ops.impl.triton_attention_split import LOG2_E, lowest_key
from troth.ops.impl.triton_attention_tile import attend_tile, load_queries, normalised
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.layer_kv import LayerKV
from troth.ops.rows import Rows

SPLIT: Final = 256
"""Keys of a part: numbers for a model depend on it."""
PROGRAMS: Final = 512
"""Programs wanted for steps of single tokens."""


@triton.jit
def _merged(
    best: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
    other_best: tl.tensor,
    other_mass: tl.tensor,
    other_acc: tl.tensor,
) -> tl.tensor:
    """Two parts of a softmax as one: best and mass [...], acc [..., D]. Operations are spelt out: all kernels round
    alike.
    """
    new_best = tl.maximum(best, other_best)
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    scale, other_scale = tl.exp2(best - finite), tl.exp2(other_best - finite)
    mass = tl.fma(mass, scale, other_mass * other_scale)
    wide, other_wide = tl.expand_dims(scale, -1), tl.expand_dims(other_scale, -1)
    return new_best, mass, tl.fma(acc, tl.broadcast_to(wide, acc.shape), other_acc * other_wide)


@triton.jit(
    do_not_specialize=["num_rows", "max_parts", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "query_start", "context_len", "part_mass"],
)
def _attend_ordered(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    tables: tl.tensor,
    query_start: tl.tensor,
    context_len: tl.tensor,
    out: tl.tensor,
    part_acc: tl.tensor,
    part_best: tl.tensor,
    part_mass: tl.tensor,
    num_rows: tl.tensor,
    max_parts: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SLOTS: tl.constexpr,
    SINGLE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """SINGLE: every row feeds one token, and programs share its parts; else a program takes all of a tile."""
    await_inputs(OVERLAP)
    program, head = tl.program_id(0), tl.program_id(1)
    TOKENS: tl.constexpr = M // G
    if SINGLE:
        row, token, tile = tl.program_id(2), tl.load(query_start + tl.program_id(2)), 0
    else:
        # The last tiles of a row see most keys: they start first.
        last = tl.num_programs(2) - 1
        row, token, tile = row_of_tile(query_start, num_rows, last - tl.program_id(2), TOKENS)
    count = tl.load(query_start + row + 1) - tl.load(query_start + row)
    first_new = tile * TOKENS
    if first_new >= count:
        return
    length = tl.load(context_len + row)
    m = tl.arange(0, M)
    new = first_new + m // G
    inside = (m < TOKENS * G) & (new < count)
    position = length - count + new
    at = ((token + new).to(tl.int64) * (K * G) + head * G + m % G) * D
    queries = load_queries(q, at, inside, D, DP)
    table = tables + row.to(tl.int64) * table_stride
    k_head, v_head = k_cache + head * (D * SLOTS), v_cache + head * (D * SLOTS)
    stride = K * D * SLOTS
    first_position = length - count + first_new
    length = tl.minimum(length, first_position + TOKENS)
    low = lowest_key(first_position, window, WINDOW)
    first_part, num_parts = low // SPLIT, tl.maximum(tl.cdiv(length, SPLIT) - low // SPLIT, 1)
    d = tl.arange(0, DP)
    wanted = inside[:, None] & (d < D)[None, :]
    all_best = tl.full([M], float("-inf"), tl.float32)
    all_mass = tl.zeros([M], tl.float32)
    all_acc = tl.zeros([M, DP], tl.float32)
    for part in range(program, num_parts, tl.num_programs(0)):
        best = tl.full([M], float("-inf"), tl.float32)
        mass = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        begin = tl.maximum((first_part + part) * SPLIT, low // TILE * TILE)
        end = tl.minimum((first_part + part + 1) * SPLIT, length)
        whole_end = begin
        if not WINDOW:
            # Keys that every query sees need no masks.
            whole_end = tl.maximum(tl.minimum((first_position + 1) // TILE * TILE, end), begin)
            for first in range(begin, whole_end, TILE):
                best, mass, acc = attend_tile(
                    queries, position, k_head, v_head, stride, table, first, low, length, scale, softcap, window,
                    best, mass, acc, D, DP, TILE, WINDOW, SOFTCAP, SLOTS, False, True,
                )  # fmt: skip
        for first in range(whole_end, end, TILE):
            best, mass, acc = attend_tile(
                queries, position, k_head, v_head, stride, table, first, low, length, scale, softcap, window,
                best, mass, acc, D, DP, TILE, WINDOW, SOFTCAP, SLOTS, True, True,
            )  # fmt: skip
        if SINGLE:
            part_at = ((row.to(tl.int64) * K + head) * max_parts + part) * G + m
            tl.store(part_best + part_at, best, mask=inside)
            tl.store(part_mass + part_at, mass, mask=inside)
            tl.store(part_acc + part_at[:, None] * D + d[None, :], acc, mask=wanted)
        else:
            all_best, all_mass, all_acc = _merged(all_best, all_mass, all_acc, best, mass, acc)
    if not SINGLE:
        y = normalised(all_mass, all_acc)
        tl.store(out + at[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["max_parts", "window"], do_not_specialize_on_alignment=["part_mass"])
def _merge_parts(
    query_start: tl.tensor,
    context_len: tl.tensor,
    out: tl.tensor,
    part_acc: tl.tensor,
    part_best: tl.tensor,
    part_mass: tl.tensor,
    max_parts: tl.tensor,
    window: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    g, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(context_len + row)
    first_part = lowest_key(length - 1, window, WINDOW) // SPLIT
    num_parts = tl.maximum(tl.cdiv(length, SPLIT) - first_part, 1)
    d = tl.arange(0, DP)
    best = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DP], tl.float32)
    for part in range(num_parts):
        at = ((row.to(tl.int64) * K + head) * max_parts + part) * G + g + tl.arange(0, 1)
        other_acc = tl.load(part_acc + at[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        best, mass, acc = _merged(best, mass, acc, tl.load(part_best + at), tl.load(part_mass + at), other_acc)
    y = tl.reshape(normalised(mass, acc), [DP])
    out_at = (tl.load(query_start + row).to(tl.int64) * (K * G) + head * G + g) * D
    tl.store(out + out_at + d, y.to(out.dtype.element_ty), mask=d < D)


def attend_ordered(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """As ops.attention."""
    out_THD = torch.empty_like(q_THD)
    single = rows.num_single
    if single:
        _attend_singles(q_THD[:single], kv, block_table_RB[:single], rows, scale, window, softcap, out_THD)
    if single < rows.num_rows:
        _attend_chunks(
            q_THD[single:], kv, block_table_RB[single:], rows, single, scale, window, softcap, out_THD[single:]
        )
    return out_THD


def _form(q_THD: Tensor, kv: LayerKV, window: int | None) -> dict[str, object]:
    head_dim = q_THD.shape[2]
    return {
        "K": kv.k_NKDS.shape[1],
        "G": q_THD.shape[1] // kv.k_NKDS.shape[1],
        "D": head_dim,
        "DP": max(16, power_of_2(head_dim)),
        "WINDOW": window is not None,
        "SPLIT": SPLIT,
        "TILE": 32 if q_THD.dtype == torch.float32 else 64,
        # A product and a sum that became one operation here and not there would round once here and twice there.
        "enable_fp_fusion": False,
    }


def _attend_singles(
    q_RHD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None,
    softcap: float | None,
    out_RHD: Tensor,
) -> None:
    num_rows, num_heads, head_dim = q_RHD.shape
    num_kv_heads = kv.k_NKDS.shape[1]
    group = num_heads // num_kv_heads
    keys = block_table_RB.shape[1] * BLOCK_TOKENS
    max_parts = triton.cdiv(keys if window is None else min(keys, window + SPLIT), SPLIT) + 1
    programs = max(1, min(max_parts, PROGRAMS // (num_rows * num_kv_heads)))
    held = num_rows * num_heads * max_parts
    part_acc = torch.empty(held, head_dim, dtype=torch.float32, device=q_RHD.device)
    part_best, part_mass = torch.empty(2, held, dtype=torch.float32, device=q_RHD.device)
    parts = (part_acc, part_best, part_mass)
    lengths = (rows.query_start_R1, rows.context_len_R)
    form, exact = _form(q_RHD, kv, window), q_RHD.dtype == torch.float32
    _attend_ordered[(programs, num_kv_heads, num_rows)](
        q_RHD,
        kv.k_NKDS,
        kv.v_NKSD,
        block_table_RB,
        *lengths,
        out_RHD,
        *parts,
        num_rows,
        max_parts,
        block_table_RB.stride(0),
        window or 0,
        scale * LOG2_E,
        softcap or 0.0,
        M=max(16, power_of_2(group)),
        SOFTCAP=softcap is not None,
        SLOTS=BLOCK_TOKENS,
        SINGLE=True,
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
        num_warps=4 if exact else 2,
        num_stages=1 if exact else 3,
        **form,
    )
    _merge_parts[(group, num_kv_heads, num_rows)](
        *lengths, out_RHD, *parts, max_parts, window or 0, OVERLAP=OVERLAP, launch_pdl=OVERLAP, num_warps=1, **form
    )


def _attend_chunks(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    first_row: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    out_THD: Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, num_rows = kv.k_NKDS.shape[1], block_table_RB.shape[0]
    group = num_heads // num_kv_heads
    exact = q_THD.dtype == torch.float32
    queries = max(16 if exact else 32 if head_dim > 128 else 128, power_of_2(group))
    _attend_ordered[(1, num_kv_heads, num_tokens // (queries // group) + num_rows)](
        q_THD,
        kv.k_NKDS,
        kv.v_NKSD,
        block_table_RB,
        rows.query_start_R1[first_row:],
        rows.context_len_R[first_row:],
        out_THD,
        q_THD,
        q_THD,
        q_THD,
        num_rows,
        1,
        block_table_RB.stride(0),
        window or 0,
        scale * LOG2_E,
        softcap or 0.0,
        M=queries,
        SOFTCAP=softcap is not None,
        SLOTS=BLOCK_TOKENS,
        SINGLE=False,
        OVERLAP=False,
        num_warps=4 if exact or head_dim > 128 else 8,
        num_stages=1 if exact else 2,
        **_form(q_THD, kv, window),
    )
