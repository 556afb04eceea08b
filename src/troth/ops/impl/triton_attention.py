"""Attention over the paged cache: by split keys for few new tokens per row, by query tiles for chunks of prompts.

The split kernels serve steps that are captured into CUDA graphs: what they launch depends on shapes alone. This file
decides which rows go where. Next: ``triton_attention_split.py``, ``triton_attention_chunk.py``,
``triton_attention_whole.py``.
Legend: T tokens, R rows, B blocks per row, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from troth.ops.attention import attention
from troth.ops.impl.triton import takes, takes_cache
from troth.ops.impl.triton_attention_chunk import attend_chunks
from troth.ops.impl.triton_attention_numbers import numbers_of
from troth.ops.impl.triton_attention_split import attend_split
from troth.ops.impl.triton_attention_whole import attend_whole, takes_whole
from troth.ops.layer_kv import LayerKV
from troth.ops.rows import Rows

SPLIT_NEW_TOKENS: Final = 8
"""Steps whose rows feed no more tokens than this go to the split kernels whole: decodes and checks of drafts."""


def takes_attention(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> bool:
    """Whether the kernels compute such a call."""
    return takes(q_THD) and q_THD.is_contiguous() and block_table_RB.stride(-1) == 1 and takes_cache(kv)


@attention.provider("triton", supports=takes_attention)
def attention_triton(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As ops.attention. A row of context 0 gives zeros; table entries below 0 are never followed."""
    if rows.num_rows == 1 and takes_whole(q_THD, kv, rows, 0, window, softcap):
        return attend_whole(q_THD, kv, block_table_RB[0], scale)
    out_THD = torch.empty_like(q_THD)
    if rows.max_new <= SPLIT_NEW_TOKENS:
        attend_split(q_THD, kv, block_table_RB, rows, rows.num_rows, rows.max_new, scale, window, softcap, out_THD)
        return out_THD
    row = token = rows.num_single
    if row:
        attend_split(q_THD, kv, block_table_RB, rows, row, 1, scale, window, softcap, out_THD)
    while row < rows.num_rows:
        if takes_whole(q_THD, kv, rows, row, window, softcap):
            stop = row + 1
            end = token + rows.num_new[row]
            out_THD[token:end] = attend_whole(q_THD[token:end], kv, block_table_RB[row], scale)
        else:
            stop = row
            while stop < rows.num_rows and not takes_whole(q_THD, kv, rows, stop, window, softcap):
                stop += 1
            end = token + sum(rows.num_new[row:stop])
            held, tables_RB = kv, block_table_RB[row:stop]
            if kv.k_scale_NKS is not None:
                held, tables_RB = numbers_of(kv, tables_RB, rows, row, q_THD.dtype)
            out = out_THD[token:end]
            attend_chunks(q_THD[token:end], held, tables_RB, rows, row, scale, window, softcap, out)
        row, token = stop, end
    return out_THD
