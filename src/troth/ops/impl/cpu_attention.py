"""Attention over the paged cache, and what comes before it, by the C++ kernels."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.attention import attention
from troth.ops.impl import cpu
from troth.ops.layer_kv import LayerKV
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write
from troth.ops.rows import Rows

_HEAD_MULTIPLE: Final = 16
"""Head sizes are whole vectors of the widest instruction set."""


def _takes_cache(kv: LayerKV) -> bool:
    k, head_dim = kv.k_NKDS, kv.k_NKDS.shape[2]
    return (
        k.device.type == "cpu"
        and k.dtype in cpu.KV_TYPES
        and head_dim % _HEAD_MULTIPLE == 0
        and kv.v_NKSD.shape[3] == head_dim
        # A block is whole; others may lie between it and the next one.
        and k.stride() == (k.stride(0), head_dim * BLOCK_TOKENS, BLOCK_TOKENS, 1)
        and kv.v_NKSD.stride() == (k.stride(0), head_dim * BLOCK_TOKENS, head_dim, 1)
        and _same_places(kv.k_scale_NKS, kv.v_scale_NKS)
    )


def _same_places(k_scale_NKS: Tensor | None, v_scale_NKS: Tensor | None) -> bool:
    if k_scale_NKS is None or v_scale_NKS is None:
        return k_scale_NKS is v_scale_NKS
    return k_scale_NKS.stride() == v_scale_NKS.stride() and k_scale_NKS.stride()[1:] == (BLOCK_TOKENS, 1)


def _takes_attention(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> bool:
    return (
        q_THD.dtype == torch.float32 and q_THD.is_contiguous() and block_table_RB.stride(-1) == 1 and _takes_cache(kv)
    )


@attention.provider("cpu", supports=_takes_attention)
def attention_cpu(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As ops.attention."""
    out_THD = torch.empty_like(q_THD)
    num_heads, head_dim = q_THD.shape[1], q_THD.shape[2]
    segments = -(-block_table_RB.shape[1] * BLOCK_TOKENS // cpu.SEGMENT_KEYS)
    parts = torch.empty(rows.num_single * num_heads * segments * (head_dim + 2))
    scratch, floats = cpu.attention_scratch(head_dim)
    starts, lengths = rows.query_start_R1, rows.context_len_R
    cpu.operations(q_THD, kv, block_table_RB, starts, lengths, scratch, results=(out_THD, parts)).attention(
        q_THD.data_ptr(),
        cpu.kv_pool(kv),
        num_heads,
        head_dim,
        block_table_RB.data_ptr(),
        block_table_RB.stride(0),
        starts.data_ptr(),
        lengths.data_ptr(),
        rows.num_rows,
        rows.num_single,
        scale,
        window or 0,
        softcap or 0.0,
        out_THD.data_ptr(),
        parts.data_ptr(),
        segments,
        scratch.data_ptr(),
        floats,
    )
    return out_THD


def _takes_rotary(
    qkv_TE: Tensor,
    num_heads: int,
    positions_T: Tensor,
    rotary: RotaryTable,
    norms: HeadNorms | None,
    slots_T: Tensor,
    kv: LayerKV,
) -> bool:
    return qkv_TE.dtype == torch.float32 and qkv_TE.is_contiguous() and _takes_cache(kv)


@rotary_kv_write.provider("cpu", supports=_takes_rotary)
def rotary_kv_write_cpu(
    qkv_TE: Tensor,
    num_heads: int,
    positions_T: Tensor,
    rotary: RotaryTable,
    norms: HeadNorms | None,
    slots_T: Tensor,
    kv: LayerKV,
) -> Tensor:
    """As ops.rotary_kv_write. Positions and slots must be inside their tables: addresses are not checked."""
    head_dim = kv.k_NKDS.shape[2]
    q_THD = torch.empty(qkv_TE.shape[0], num_heads, head_dim)
    cpu.operations(qkv_TE, positions_T, rotary, norms, slots_T, kv, results=(q_THD,)).rotary(
        qkv_TE.data_ptr(),
        num_heads,
        head_dim,
        positions_T.data_ptr(),
        rotary.cos_PW.data_ptr(),
        rotary.sin_PW.data_ptr(),
        rotary.cos_PW.shape[1],
        0 if norms is None else norms.q_D.data_ptr(),
        0 if norms is None else norms.k_D.data_ptr(),
        0.0 if norms is None else norms.eps,
        slots_T.data_ptr(),
        cpu.kv_pool(kv),
        q_THD.data_ptr(),
        qkv_TE.shape[0],
    )
    return q_THD
