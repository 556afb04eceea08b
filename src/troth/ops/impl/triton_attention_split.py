"""Attention of a few new tokens per row over long contexts: a row's keys are split among programs, then merged.

All query heads of a key-value head, for all new tokens of the row, are one tile. Each program takes one part of the
keys, as long as the row's length and the number of programs make it; those left over return at once, so tables may have
full width. Where there are rows enough to fill a GPU, one program takes a whole row.
Legend: R rows, K key-value heads, G query heads of each, W new tokens per row at most, P programs per row and head.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.impl.triton import power_of_2, scales_of
from troth.ops.impl.triton_attention_tile import attend_tile, load_queries, normalised
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.layer_kv import LayerKV
from troth.ops.rows import Rows

LOG2_E: Final = 1.4426950408889634
LEAST_SPLIT: Final = 64
"""Keys of a split at least."""
MOST_PROGRAMS: Final = 64
"""Of a row and head: what one program of the merge holds at once."""
FEW_PROGRAMS: Final = 16
"""Merged as if they were so many: a kernel for each number would be compiled when a request first meets it."""
PROGRAMS: Final = 512
"""Programs of one launch that are wanted; more only wait for each other."""
ENOUGH_TILES: Final = 256
"""Rows times heads that fill an H200 by themselves where tables are narrow: splitting them costs more than it gains."""
NARROW_TOKENS: Final = 1024


class _Tiling(NamedTuple):
    """How a program goes through its keys."""

    keys: int
    num_warps: int
    num_stages: int


FEW: Final = _Tiling(64, 2, 3)
SOME: Final = _Tiling(32, 1, 5)
MANY: Final = _Tiling(16, 1, 4)
"""By rows times heads. On an H200, contexts of 320 tokens: 1 row 5.8 us, 32 rows 15.6 (as FEW 17.5), 128 rows 44.4 (as
FEW 50.5; 3.8 TB/s); one warp waits for no other."""
MANY_CODES: Final = _Tiling(32, 1, 4)
"""Caches of codes: 128 rows 39 us in int8 and 44 in fp8 (as MANY 50 and 51), 32 rows as FEW 19 and 20 (as SOME 20 and
25)."""
SOME_TILES: Final = 128
MANY_TILES: Final = 1024


@triton.jit
def _split(
    low: tl.tensor, length: tl.tensor, programs: tl.tensor, LEAST: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """First key of the first split, keys per split, number of splits: at least 1, at most ``programs``."""
    base = low // TILE * TILE
    span = tl.maximum(length - base, 1)
    tokens = tl.maximum(tl.cdiv(tl.cdiv(span, programs), TILE) * TILE, LEAST)
    return base, tokens, tl.cdiv(span, tokens)


@triton.jit
def lowest_key(first_position: tl.tensor, window: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """The first key that the query at ``first_position`` sees."""
    if WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
    else:
        low = first_position * 0
    return low


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "query_start", "context_len", "part_mass"],
)
def _attend_split(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    tables: tl.tensor,
    query_start: tl.tensor,
    context_len: tl.tensor,
    out: tl.tensor,
    part_acc: tl.tensor,
    part_best: tl.tensor,
    part_mass: tl.tensor,
    table_stride: tl.tensor,
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
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    programs = tl.num_programs(0)
    token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - token
    length = tl.load(context_len + row)
    low = lowest_key(length - count, window, WINDOW)
    base, split_tokens, num_splits = _split(low, length, programs, LEAST, TILE)
    if split >= num_splits:
        return
    m = tl.arange(0, M)
    new = m // G
    inside = (m < G * W) & (new < count)
    position = length - count + new
    at = ((token + new).to(tl.int64) * (K * G) + head * G + m % G) * D
    queries = load_queries(q, at, inside, D, DP)
    table = tables + row.to(tl.int64) * table_stride
    k_head, v_head = k_cache + head * (D * SLOTS), v_cache + head * (D * SLOTS)
    k_scale, v_scale = k_scales + head * SLOTS, v_scales + head * SLOTS
    stride = K * D * SLOTS
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
                queries, position, k_head, v_head, stride, table, first, low, length, scale, softcap,
                window, best, mass, acc, D, DP, TILE, WINDOW, SOFTCAP, SLOTS, False,
                False, SCALED, k_scale, v_scale,
            )  # fmt: skip
    for first in range(whole_end, end, TILE):
        best, mass, acc = attend_tile(
            queries, position, k_head, v_head, stride, table, first, low, length, scale, softcap,
            window, best, mass, acc, D, DP, TILE, WINDOW, SOFTCAP, SLOTS, True,
            False, SCALED, k_scale, v_scale,
        )  # fmt: skip
    d = tl.arange(0, DP)
    wanted = inside[:, None] & (d < D)[None, :]
    if num_splits == 1:
        tl.store(out + at[:, None] + d[None, :], normalised(mass, acc).to(out.dtype.element_ty), mask=wanted)
    else:
        part_at = ((row.to(tl.int64) * K + head) * programs + split) * (G * W) + m
        tl.store(part_best + part_at, best, mask=inside)
        tl.store(part_mass + part_at, mass, mask=inside)
        tl.store(part_acc + part_at[:, None] * D + d[None, :], acc, mask=wanted)


@triton.jit(
    do_not_specialize=["programs", "window"],
    do_not_specialize_on_alignment=["query_start", "context_len", "part_mass"],
)
def _merge_splits(
    query_start: tl.tensor,
    context_len: tl.tensor,
    out: tl.tensor,
    part_acc: tl.tensor,
    part_best: tl.tensor,
    part_mass: tl.tensor,
    programs: tl.tensor,
    window: tl.tensor,
    K: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WINDOW: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    m, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - token
    length = tl.load(context_len + row)
    _, _, num_splits = _split(lowest_key(length - count, window, WINDOW), length, programs, LEAST, TILE)
    new = m // G
    if (num_splits == 1) | (new >= count):
        return
    split, d = tl.arange(0, PARTS), tl.arange(0, DP)
    held = split < num_splits
    at = ((row.to(tl.int64) * K + head) * programs + split) * (G * W) + m
    best = tl.load(part_best + at, mask=held, other=float("-inf"))
    mass = tl.load(part_mass + at, mask=held, other=0.0)
    acc = tl.load(part_acc + at[:, None] * D + d[None, :], mask=held[:, None] & (d < D)[None, :], other=0.0)
    # Some split is seen: that of the query itself.
    weight = tl.exp2(best - tl.max(best, axis=0))
    y = tl.sum(acc * weight[:, None], axis=0) / tl.sum(mass * weight, axis=0)
    out_at = ((token + new).to(tl.int64) * (K * G) + head * G + m % G) * D
    tl.store(out + out_at + d, y.to(out.dtype.element_ty), mask=d < D)


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
    """Attention of the first ``num_rows`` rows, which feed ``width`` tokens each at most, into ``out_THD``.

    Kernels are of widths 1, 2, 4 and 8: few enough to be compiled ahead of requests (``run/rehearsal.py``).
    """
    width = power_of_2(width)
    num_kv_heads, head_dim = kv.k_NKDS.shape[1], kv.k_NKDS.shape[2]
    group = q_THD.shape[1] // num_kv_heads
    keys = block_table_RB.shape[1] * BLOCK_TOKENS
    queries, wide = max(16, power_of_2(group * width)), max(16, power_of_2(head_dim))
    tiling = _tiling(num_rows * num_kv_heads, queries * wide, q_THD.dtype, kv.k_scale_NKS is not None)
    if window is not None:
        keys = min(keys, window + width + tiling.keys)
    programs = _programs(num_rows * num_kv_heads, keys)
    parts = num_rows * num_kv_heads * programs * group * width if programs > 1 else 1
    part_acc = torch.empty(parts, head_dim, dtype=torch.float32, device=q_THD.device)
    part_best, part_mass = torch.empty(2, parts, dtype=torch.float32, device=q_THD.device)
    form = {
        "K": num_kv_heads,
        "G": group,
        "W": width,
        "D": head_dim,
        "DP": wide,
        "WINDOW": window is not None,
        "LEAST": LEAST_SPLIT,
        "TILE": tiling.keys,
        "OVERLAP": OVERLAP,
        "launch_pdl": OVERLAP,
    }
    _attend_split[(programs, num_kv_heads, num_rows)](
        q_THD,
        kv.k_NKDS,
        kv.v_NKSD,
        *scales_of(kv),
        block_table_RB,
        rows.query_start_R1,
        rows.context_len_R,
        out_THD,
        part_acc,
        part_best,
        part_mass,
        block_table_RB.stride(0),
        window or 0,
        scale * LOG2_E,
        softcap or 0.0,
        M=queries,
        SOFTCAP=softcap is not None,
        SLOTS=BLOCK_TOKENS,
        SCALED=kv.k_scale_NKS is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **form,
    )
    if programs > 1:
        parts_held = FEW_PROGRAMS if programs <= FEW_PROGRAMS else MOST_PROGRAMS
        _merge_splits[(group * width, num_kv_heads, num_rows)](
            rows.query_start_R1,
            rows.context_len_R,
            out_THD,
            part_acc,
            part_best,
            part_mass,
            programs,
            window or 0,
            PARTS=parts_held,
            num_warps=2 if parts_held == FEW_PROGRAMS else 8,
            **form,
        )


def _programs(num_tiles: int, keys: int) -> int:
    """Programs per row and head, by how many rows and heads there are and the keys that a row may have."""
    if num_tiles >= ENOUGH_TILES and keys <= NARROW_TOKENS:
        return 1
    return max(1, min(MOST_PROGRAMS, PROGRAMS // num_tiles, triton.cdiv(keys, LEAST_SPLIT)))


def _tiling(num_tiles: int, held: int, dtype: torch.dtype, is_coded: bool) -> _Tiling:
    """``held``: numbers of the running sums, which one warp must hold in its registers."""
    if num_tiles < SOME_TILES or held > 16 * 128 or dtype == torch.float32:
        return FEW
    if is_coded:
        return FEW if num_tiles < MANY_TILES else MANY_CODES
    return SOME if num_tiles < MANY_TILES else MANY
