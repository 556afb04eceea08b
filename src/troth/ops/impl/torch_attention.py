"""Attention by gathering blocks and calling PyTorch's scaled_dot_product_attention.

Single-token rows go together, padded to the longest context; chunks go one row at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.attention import attention
from troth.ops.layer_kv import LayerKV
from troth.ops.rows import Rows


def _takes_attention(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> bool:
    return softcap is None


@attention.provider("torch", supports=_takes_attention)
def attention_torch(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As ops.attention, without softcap."""
    out_THD = torch.empty_like(q_THD)
    single = rows.num_single
    if single:
        out_THD[:single] = _decode(q_THD[:single], kv, block_table_RB[:single], rows, scale, window)
    begin = single
    for r in range(single, rows.num_rows):
        end = begin + rows.num_new[r]
        table_B = block_table_RB[r]
        out_THD[begin:end] = _chunk(q_THD[begin:end], kv, table_B, rows.starts[r], scale, window)
        begin = end
    return out_THD


def _decode(q_RHD: Tensor, kv: LayerKV, block_table_RB: Tensor, rows: Rows, scale: float, window: int | None) -> Tensor:
    starts = rows.starts[: q_RHD.shape[0]]
    shortest, longest = min(starts) + 1, max(starts) + 1
    first = 0 if window is None else max(0, shortest - window) // BLOCK_TOKENS
    table_RB = block_table_RB[:, first : -(-longest // BLOCK_TOKENS)].long()
    if shortest < longest:
        table_RB.clamp_(min=0)
    k_RKLD = kv.keys(table_RB).permute(0, 2, 1, 4, 3).flatten(2, 3)
    v_RKLD = kv.values(table_RB).transpose(1, 2).flatten(2, 3)
    offset = first * BLOCK_TOKENS
    if shortest == longest:
        # All rows see the same keys: cutting them out needs no mask.
        begin = 0 if window is None else max(0, longest - window) - offset
        k_RKLD, v_RKLD = k_RKLD[:, :, begin : longest - offset], v_RKLD[:, :, begin : longest - offset]
        return _sdpa(q_RHD.unsqueeze(2), k_RKLD, v_RKLD, None, scale).squeeze(2)
    key_L = torch.arange(offset, offset + k_RKLD.shape[2], device=q_RHD.device)
    last_R1 = rows.context_len_R[: q_RHD.shape[0], None] - 1
    seen_RL = key_L <= last_R1
    if window is not None:
        seen_RL &= key_L > last_R1 - window
    # A slot never written may hold anything, and 0 * nan is nan: what is masked must be finite.
    unseen = ~seen_RL[:, None, :, None]
    k_RKLD, v_RKLD = k_RKLD.masked_fill(unseen, 0), v_RKLD.masked_fill(unseen, 0)
    return _sdpa(q_RHD.unsqueeze(2), k_RKLD, v_RKLD, seen_RL[:, None, None, :], scale).squeeze(2)


def _chunk(q_THD: Tensor, kv: LayerKV, table_B: Tensor, start: int, scale: float, window: int | None) -> Tensor:
    length = start + q_THD.shape[0]
    first = 0 if window is None else max(0, start - window + 1) // BLOCK_TOKENS
    table = table_B[first : -(-length // BLOCK_TOKENS)].long()
    offset = first * BLOCK_TOKENS
    k_KLD = kv.keys(table).permute(1, 0, 3, 2).flatten(1, 2)[:, : length - offset]
    v_KLD = kv.values(table).transpose(0, 1).flatten(1, 2)[:, : length - offset]
    seen_TL: Tensor | None = None
    if start > 0 or (window is not None and window < length):
        key_L = torch.arange(offset, length, device=q_THD.device)
        query_T1 = torch.arange(start, length, device=q_THD.device)[:, None]
        seen_TL = key_L <= query_T1
        if window is not None:
            seen_TL &= key_L > query_T1 - window
    q_HTD = q_THD.transpose(0, 1)
    return _sdpa(q_HTD[None], k_KLD[None], v_KLD[None], seen_TL, scale, causal=seen_TL is None)[0].transpose(0, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        attn_mask=mask,
        scale=scale,
        is_causal=causal,
        enable_gqa=q.shape[1] != k.shape[1],
    )
