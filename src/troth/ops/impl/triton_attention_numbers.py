"""Rows of a cache of codes as numbers, in a pool of their own: what attention of chunks of prompts reads.

Queries of a chunk meet each key many times, and it becomes a number once. Rows of few new tokens read codes themselves
(``triton_attention_split.py``).
Legend: R rows, B blocks per row, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.impl.triton import power_of_2, scales_of
from troth.ops.layer_kv import LayerKV
from troth.ops.rows import Rows


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "context_len", "first_block"])
def _numbers(
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    tables: tl.tensor,
    context_len: tl.tensor,
    first_block: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    table_stride: tl.tensor,
    K: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    index, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = index * SLOTS < tl.load(context_len + row)
    block = tl.load(tables + row.to(tl.int64) * table_stride + index, mask=held, other=-1).to(tl.int64)
    # What lies before a window is gone.
    if block >= 0:
        s, d = tl.arange(0, SLOTS), tl.arange(0, DP)
        at, inside = block * K + head, d < D
        out_at = (tl.load(first_block + row) + index) * K + head
        k_at, v_at = (d * SLOTS)[:, None] + s[None, :], (s * D)[:, None] + d[None, :]
        k = tl.load(k_cache + at * (D * SLOTS) + k_at, mask=inside[:, None], other=0.0).to(tl.float32)
        v = tl.load(v_cache + at * (D * SLOTS) + v_at, mask=inside[None, :], other=0.0).to(tl.float32)
        k = k * tl.load(k_scales + at * SLOTS + s)[None, :]
        v = v * tl.load(v_scales + at * SLOTS + s)[:, None]
        tl.store(k_out + out_at * (D * SLOTS) + k_at, k.to(k_out.dtype.element_ty), mask=inside[:, None])
        tl.store(v_out + out_at * (D * SLOTS) + v_at, v.to(v_out.dtype.element_ty), mask=inside[None, :])


def numbers_of(
    kv: LayerKV, block_table_RB: Tensor, rows: Rows, first_row: int, dtype: torch.dtype
) -> tuple[LayerKV, Tensor]:
    """Keys and values of some rows as ``dtype``, and the block table, int32 [R, B], by which they are found.

    Args:
        kv: a cache of codes.
        block_table_RB: of these rows.
        rows: all of the step's.
        first_row: the first of these.
    """
    num_rows, num_kv_heads, head_dim = block_table_RB.shape[0], kv.k_NKDS.shape[1], kv.k_NKDS.shape[2]
    some = slice(first_row, first_row + num_rows)
    counts = [-(-(a + b) // BLOCK_TOKENS) for a, b in zip(rows.starts[some], rows.num_new[some], strict=True)]
    context_len_R = rows.context_len_R[some]
    count_R = (context_len_R.long() + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    first_R = count_R.cumsum(0) - count_R
    made = LayerKV(
        k_NKDS=torch.empty(sum(counts), num_kv_heads, head_dim, BLOCK_TOKENS, dtype=dtype, device=kv.k_NKDS.device),
        v_NKSD=torch.empty(sum(counts), num_kv_heads, BLOCK_TOKENS, head_dim, dtype=dtype, device=kv.k_NKDS.device),
    )
    _numbers[(max(counts), num_kv_heads, num_rows)](
        kv.k_NKDS,
        kv.v_NKSD,
        *scales_of(kv),
        block_table_RB,
        context_len_R,
        first_R,
        made.k_NKDS,
        made.v_NKSD,
        block_table_RB.stride(0),
        K=num_kv_heads,
        D=head_dim,
        DP=power_of_2(head_dim),
        SLOTS=BLOCK_TOKENS,
        num_warps=4,
    )
    return made, (first_R[:, None] + torch.arange(max(counts), device=first_R.device)).int()
