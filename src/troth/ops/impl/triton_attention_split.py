"""Attention of a few new tokens per row over long contexts: a row's keys are split among programs, then merged.

All query heads of a key-value head, for all new tokens of the row, are one tile. How a row is split depends on its own
length alone, never on its neighbours, so its result does not either. Programs of a row take its splits in turns; those
without one return at once, so tables may have full width. Where there are rows enough to fill a GPU, one program takes
all splits of a row and merges them as it goes, in the order in which a second kernel merges them otherwise.
Legend: R rows, K key-value heads, G query heads of each, W new tokens per row at most, P programs per row and head.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.impl.triton import power_of_2
from troth.ops.impl.triton_attention_tile import attend_tile, load_queries, normalised
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.layer_kv import LayerKV
from troth.ops.rows import Rows

LOG2_E: Final = 1.4426950408889634
TILE_TOKENS: Final = 64
SPLIT_TOKENS: Final = 128
"""Keys per split, as long as MAX_SPLITS of them hold the row; beyond, splits grow by whole multiples. On an H200, 128
rows of 256 keys take 48 us in one split each and 55 us in two (3.75 TB/s at 2,048 keys); one row alone 9 us and 7."""
GROUP_SPLITS: Final = 8
"""Splits that are merged one after the other into a group; the groups of a row are, too."""
MAX_SPLITS: Final = GROUP_SPLITS * 8
PROGRAMS: Final = 1024
"""Programs of one launch that are wanted at least, as far as splits go: those that stay empty cost time too."""
WARPS: Final = 2
"""More of them wait for each other at every tile."""
STAGES: Final = 3


@triton.jit
def _splits(low: tl.tensor, length: tl.tensor, SPLIT: tl.constexpr, MAX: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """First key of the first split, keys per split, number of splits."""
    base = low // TILE * TILE
    span = tl.maximum(length - base, 0)
    tokens = SPLIT * tl.maximum(tl.cdiv(span, SPLIT * MAX), 1)
    return base, tokens, tl.cdiv(span, tokens)


@triton.jit
def lowest_key(first_position: tl.tensor, window: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """The first key that the query at ``first_position`` sees."""
    if WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
    else:
        low = first_position * 0
    return low


@triton.jit
def _merged(
    best: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
    other_best: tl.tensor,
    other_mass: tl.tensor,
    other_acc: tl.tensor,
) -> tl.tensor:
    """Two parts of a softmax as one: best and mass [...], acc [..., D]. Operations are spelt out so that both kernels
    round alike.
    """
    new_best = tl.maximum(best, other_best)
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    scale, other_scale = tl.exp2(best - finite), tl.exp2(other_best - finite)
    mass = tl.fma(mass, scale, other_mass * other_scale)
    wide, other_wide = tl.expand_dims(scale, -1), tl.expand_dims(other_scale, -1)
    return new_best, mass, tl.fma(acc, tl.broadcast_to(wide, acc.shape), other_acc * other_wide)


@triton.jit(do_not_specialize=["num_parts", "window"])
def _attend_split(
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
    table_stride: tl.tensor,
    num_parts: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    ALONE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    program, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - token
    length = tl.load(context_len + row)
    low = lowest_key(length - count, window, WINDOW)
    base, split_tokens, num_splits = _splits(low, length, SPLIT, MAX, TILE)
    if program >= tl.maximum(num_splits, 1):
        return
    m = tl.arange(0, M)
    new = m // G
    inside = (m < G * W) & (new < count)
    position = length - count + new
    at = ((token + new).to(tl.int64) * (K * G) + head * G + m % G) * D
    queries = load_queries(q, at, inside, D, DP)
    table = tables + row.to(tl.int64) * table_stride
    head_at = head * (D * SLOTS)
    d = tl.arange(0, DP)
    wanted = inside[:, None] & (d < D)[None, :]
    part = (row.to(tl.int64) * K + head) * num_parts
    if ALONE:
        group_best = tl.full([M], float("-inf"), tl.float32)
        group_mass = tl.zeros([M], tl.float32)
        group_acc = tl.zeros([M, DP], tl.float32)
        row_best, row_mass, row_acc = group_best, group_mass, group_acc
    for split in range(program, tl.maximum(num_splits, 1), tl.num_programs(0)):
        best = tl.full([M], float("-inf"), tl.float32)
        mass = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        begin = base + split * split_tokens
        end = tl.minimum(begin + split_tokens, length)
        whole_end = begin
        if not WINDOW:
            # Keys that every query sees need no masks.
            whole_end = tl.maximum(tl.minimum((length - count + 1) // TILE * TILE, end), begin)
            for first in range(begin, whole_end, TILE):
                best, mass, acc = attend_tile(
                    queries, position, k_cache + head_at, v_cache + head_at, K * D * SLOTS, table, first, low, length,
                    scale, softcap, window, best, mass, acc, D, DP, TILE, WINDOW, SOFTCAP, SLOTS, False,
                )  # fmt: skip
        for first in range(whole_end, end, TILE):
            best, mass, acc = attend_tile(
                queries, position, k_cache + head_at, v_cache + head_at, K * D * SLOTS, table, first, low, length,
                scale, softcap, window, best, mass, acc, D, DP, TILE, WINDOW, SOFTCAP, SLOTS, True,
            )  # fmt: skip
        if ALONE:
            group_best, group_mass, group_acc = _merged(group_best, group_mass, group_acc, best, mass, acc)
            if split % GROUP == GROUP - 1:
                row_best, row_mass, row_acc = _merged(row_best, row_mass, row_acc, group_best, group_mass, group_acc)
                group_best = tl.full([M], float("-inf"), tl.float32)
                group_mass = tl.zeros([M], tl.float32)
                group_acc = tl.zeros([M, DP], tl.float32)
        elif num_splits <= 1:
            y = normalised(mass, acc)
            tl.store(out + at[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=wanted)
        else:
            part_at = (part + split) * (G * W) + m
            tl.store(part_best + part_at, best, mask=inside)
            tl.store(part_mass + part_at, mass, mask=inside)
            tl.store(part_acc + part_at[:, None] * D + d[None, :], acc, mask=wanted)
    if ALONE:
        _, row_mass, row_acc = _merged(row_best, row_mass, row_acc, group_best, group_mass, group_acc)
        y = normalised(row_mass, row_acc)
        tl.store(out + at[:, None] + d[None, :], y.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_parts", "window"])
def _merge_splits(
    query_start: tl.tensor,
    context_len: tl.tensor,
    out: tl.tensor,
    part_acc: tl.tensor,
    part_best: tl.tensor,
    part_mass: tl.tensor,
    num_parts: tl.tensor,
    window: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    m, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - token
    length = tl.load(context_len + row)
    _, _, num_splits = _splits(lowest_key(length - count, window, WINDOW), length, SPLIT, MAX, TILE)
    new = m // G
    if (num_splits <= 1) | (new >= count):
        return
    d = tl.arange(0, DP)
    group = tl.arange(0, MAX // GROUP)
    best = tl.full([MAX // GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([MAX // GROUP], tl.float32)
    acc = tl.zeros([MAX // GROUP, DP], tl.float32)
    for member in range(GROUP):
        split = group * GROUP + member
        held = split < num_splits
        part_at = ((row.to(tl.int64) * K + head) * num_parts + split) * (G * W) + m
        other_best = tl.load(part_best + part_at, mask=held, other=float("-inf"))
        other_mass = tl.load(part_mass + part_at, mask=held, other=0.0)
        acc_at = part_acc + part_at[:, None] * D + d[None, :]
        other_acc = tl.load(acc_at, mask=held[:, None] & (d < D)[None, :], other=0.0)
        best, mass, acc = _merged(best, mass, acc, other_best, other_mass, other_acc)
    row_best = tl.full([1], float("-inf"), tl.float32)
    row_mass = tl.zeros([1], tl.float32)
    row_acc = tl.zeros([1, DP], tl.float32)
    for number in range(tl.cdiv(num_splits, GROUP)):
        # Sums of one number and zeros: the group as it is.
        is_it = group == number
        group_best = tl.max(tl.where(is_it, best, float("-inf")), axis=0, keep_dims=True)
        group_mass = tl.sum(tl.where(is_it, mass, 0.0), axis=0, keep_dims=True)
        group_acc = tl.sum(tl.where(is_it[:, None], acc, 0.0), axis=0, keep_dims=True)
        row_best, row_mass, row_acc = _merged(row_best, row_mass, row_acc, group_best, group_mass, group_acc)
    y = tl.reshape(normalised(row_mass, row_acc), [DP])
    at = ((token + new).to(tl.int64) * (K * G) + head * G + m % G) * D
    tl.store(out + at + d, y.to(out.dtype.element_ty), mask=d < D)


def attend_split(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    num_rows: int,
    width: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    out_THD: Tensor,
) -> None:
    """Attention of the first ``num_rows`` rows, which feed ``width`` tokens each at most, into ``out_THD``."""
    num_kv_heads, head_dim = kv.k_NKDS.shape[1], kv.k_NKDS.shape[2]
    group = q_THD.shape[1] // num_kv_heads
    keys = block_table_RB.shape[1] * BLOCK_TOKENS
    if window is not None:
        keys = min(keys, window + width + TILE_TOKENS)
    num_parts = min(MAX_SPLITS, triton.cdiv(keys, SPLIT_TOKENS))
    programs = min(num_parts, max(1, PROGRAMS // (num_rows * num_kv_heads)))
    parts = num_rows * num_kv_heads * num_parts * group * width if programs > 1 else 1
    part_acc = torch.empty(parts, head_dim, dtype=torch.float32, device=q_THD.device)
    part_best, part_mass = torch.empty(2, parts, dtype=torch.float32, device=q_THD.device)
    form = {
        "K": num_kv_heads,
        "G": group,
        "W": width,
        "D": head_dim,
        "DP": max(16, power_of_2(head_dim)),
        "WINDOW": window is not None,
        "SPLIT": SPLIT_TOKENS,
        "MAX": MAX_SPLITS,
        "TILE": TILE_TOKENS,
        "GROUP": GROUP_SPLITS,
        "OVERLAP": OVERLAP,
        "launch_pdl": OVERLAP,
    }
    _attend_split[(programs, num_kv_heads, num_rows)](
        q_THD,
        kv.k_NKDS,
        kv.v_NKSD,
        block_table_RB,
        rows.query_start_R1,
        rows.context_len_R,
        out_THD,
        part_acc,
        part_best,
        part_mass,
        block_table_RB.stride(0),
        num_parts,
        window or 0,
        scale * LOG2_E,
        softcap or 0.0,
        M=max(16, power_of_2(group * width)),
        SOFTCAP=softcap is not None,
        SLOTS=BLOCK_TOKENS,
        ALONE=programs == 1 and num_parts > 1,
        num_warps=WARPS,
        num_stages=STAGES,
        **form,
    )
    if programs > 1:
        _merge_splits[(group * width, num_kv_heads, num_rows)](
            rows.query_start_R1,
            rows.context_len_R,
            out_THD,
            part_acc,
            part_best,
            part_mass,
            num_parts,
            window or 0,
            num_warps=2,
            **form,
        )
