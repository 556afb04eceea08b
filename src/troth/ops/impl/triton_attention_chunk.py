"""Attention of chunks of prompts over the paged cache, rows of any length side by side, by tiles of queries.

A program takes one head of one tile of queries. Which row a tile belongs to is found on the device: row r's tiles begin
at number query_start[r] // M + r, so that a grid of T // M + R tiles holds them all and some stay empty.
Legend: T tokens, R rows, M queries of a tile, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.impl.triton import power_of_2
from troth.ops.impl.triton_attention_split import LOG2_E, lowest_key
from troth.ops.impl.triton_attention_tile import attend_tile, load_queries, normalised
from troth.ops.layer_kv import LayerKV
from troth.ops.rows import Rows

SHORT_CONTEXT: Final = 2048
"""Up to so many keys small tiles win: fewer of a row's queries see only part of a tile."""


@triton.jit
def row_of_tile(query_start: tl.tensor, num_rows: tl.tensor, tile: tl.tensor, M: tl.constexpr) -> tl.tensor:
    """The last row whose first tile is not after ``tile``; its first token; the tile's number in it."""
    origin = tl.load(query_start)
    row = tile * 0
    above = row + num_rows
    while above - row > 1:
        middle = (row + above) // 2
        if (tl.load(query_start + middle) - origin) // M + middle <= tile:
            row = middle
        else:
            above = middle
    token = tl.load(query_start + row) - origin
    return row, token, tile - token // M - row


@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "query_start", "context_len"],
)
def _attend_chunks(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    tables: tl.tensor,
    query_start: tl.tensor,
    context_len: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    # The last tiles of a row see most keys: they start first.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, token, tile = row_of_tile(query_start, num_rows, tile, M)
    count = tl.load(query_start + row + 1) - tl.load(query_start + row)
    new = tile * M + tl.arange(0, M)
    if tile * M >= count:
        return
    length = tl.load(context_len + row)
    first_position = length - count + tile * M
    position = first_position + tl.arange(0, M)
    at = ((token + new).to(tl.int64) * H + head) * D
    inside = new < count
    queries = load_queries(q, at, inside, D, DP)
    table = tables + row.to(tl.int64) * table_stride
    head_at = head // (H // K) * (D * SLOTS)
    low = lowest_key(first_position, window, WINDOW)
    # Keys low_end .. whole_end are seen by every query of the tile, the others by some.
    low_end = low
    if WINDOW:
        low_end = tl.cdiv(lowest_key(first_position + M - 1, window, WINDOW), TILE) * TILE
    begin = low // TILE * TILE
    whole_end = tl.maximum((first_position + 1) // TILE * TILE, begin)
    low_end = tl.minimum(tl.maximum(low_end, begin), whole_end)
    end = tl.minimum(first_position + M, length)
    best = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    k_head, v_head, stride = k_cache + head_at, v_cache + head_at, K * D * SLOTS
    if WINDOW:
        for first in range(begin, low_end, TILE):
            best, mass, acc = attend_tile(
                queries, position, k_head, v_head, stride, table, first, low, length, scale, softcap, window,
                best, mass, acc, D, DP, TILE, WINDOW, SOFTCAP, SLOTS, True,
            )  # fmt: skip
    for first in range(low_end, whole_end, TILE):
        best, mass, acc = attend_tile(
            queries, position, k_head, v_head, stride, table, first, low, length, scale, softcap, window,
            best, mass, acc, D, DP, TILE, WINDOW, SOFTCAP, SLOTS, False,
        )  # fmt: skip
    for first in range(whole_end, end, TILE):
        best, mass, acc = attend_tile(
            queries, position, k_head, v_head, stride, table, first, low, length, scale, softcap, window,
            best, mass, acc, D, DP, TILE, WINDOW, SOFTCAP, SLOTS, True,
        )  # fmt: skip
    d = tl.arange(0, DP)
    wanted = inside[:, None] & (d < D)[None, :]
    tl.store(out + at[:, None] + d[None, :], normalised(mass, acc).to(out.dtype.element_ty), mask=wanted)


def attend_chunks(
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
    """Attention of the rows of ``block_table_RB``, the step's from ``first_row`` on, whose tokens are ``q_THD``."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_rows = block_table_RB.shape[0]
    wide = max(16, power_of_2(head_dim))
    longest = max(start + new for start, new in zip(rows.starts[first_row:], rows.num_new[first_row:], strict=True))
    queries, tile, num_warps, num_stages = _tiling(q_THD.dtype, wide, longest)
    _attend_chunks[(num_tokens // queries + num_rows, num_heads)](
        q_THD,
        kv.k_NKDS,
        kv.v_NKSD,
        block_table_RB,
        rows.query_start_R1[first_row:],
        rows.context_len_R[first_row:],
        out_THD,
        num_rows,
        block_table_RB.stride(0),
        window or 0,
        scale * LOG2_E,
        softcap or 0.0,
        H=num_heads,
        K=kv.k_NKDS.shape[1],
        M=queries,
        D=head_dim,
        DP=wide,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        TILE=tile,
        SLOTS=BLOCK_TOKENS,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _tiling(dtype: torch.dtype, head_dim: int, longest: int) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, warps, stages, by the longest context.

    On an H200, heads of 128: 2,048 tokens of four prompts 66 us (128 queries and keys: 78), 2,048 behind 6,144 731 us
    (64: 831).
    """
    if dtype == torch.float32:
        # Exact products run on the ordinary units, from registers.
        return 32, 32, 4, 1
    if head_dim > 128 or longest <= SHORT_CONTEXT:
        return 64, 64, 4, 2
    return 128, 128, 8, 3
