"""Attention of new tokens over a paged KV cache that already holds their keys and values.

Legend: T tokens, R rows, B blocks per row, N blocks in the pool, H query heads, K key-value heads, G = H / K,
S = 16 slots of a block, D head size, L keys seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.registry import Tolerance, op
from troth.ops.rows import Rows


@dataclass(slots=True)
class LayerKV:
    """One layer's share of its group's block pool, written and read in place."""

    k_NKDS: Tensor
    """Keys are stored transposed inside a block (docs/adr/0006)."""
    v_NKSD: Tensor


@op(
    tolerances={
        torch.float32: Tolerance(2e-5, 2e-5, "sums of up to a few thousand float32 products in another order"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "the output is rounded to 8 bits of mantissa"),
        torch.float16: Tolerance(2e-3, 2e-3, "the output is rounded to 11 bits of mantissa"),
    }
)
def attention(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v, causal, per row, over the row's blocks.

    Args:
        q_THD: float [T, H, D], rotated queries of the new tokens.
        kv: the layer's cache; keys and values of the new tokens are in it already.
        block_table_RB: int32 [R, B].
        rows: which tokens belong to which row and how long each row's context is.
        scale: multiplies the scores.
        window: a query sees its own position and the window - 1 before it; None: everything before.
        softcap: scores become softcap * tanh(scores / softcap) before the mask (Gemma 2); None: off.

    Returns:
        float [T, H, D], dtype of q.
    """
    out_THD = torch.empty_like(q_THD)
    num_heads = q_THD.shape[1]
    num_kv_heads = kv.k_NKDS.shape[1]
    begin = 0
    for r in range(rows.num_rows):
        count, start = rows.num_new[r], rows.starts[r]
        length = start + count
        first = 0 if window is None else max(0, start - window + 1) // BLOCK_TOKENS
        table = block_table_RB[r, first : -(-length // BLOCK_TOKENS)].long()
        k_KLD = _gather(kv.k_NKDS.transpose(2, 3), table, length - first * BLOCK_TOKENS)
        v_KLD = _gather(kv.v_NKSD, table, length - first * BLOCK_TOKENS)
        k_HLD = k_KLD.repeat_interleave(num_heads // num_kv_heads, dim=0)
        v_HLD = v_KLD.repeat_interleave(num_heads // num_kv_heads, dim=0)
        q_HTD = q_THD[begin : begin + count].float().transpose(0, 1)
        scores_HTL = q_HTD @ k_HLD.transpose(1, 2) * scale
        if softcap is not None:
            scores_HTL = softcap * torch.tanh(scores_HTL / softcap)
        key_L = torch.arange(first * BLOCK_TOKENS, length, device=q_THD.device)
        query_T1 = torch.arange(start, length, device=q_THD.device)[:, None]
        seen_TL = key_L <= query_T1
        if window is not None:
            seen_TL &= key_L > query_T1 - window
        scores_HTL = scores_HTL.masked_fill(~seen_TL, float("-inf"))
        out_HTD = scores_HTL.softmax(dim=-1) @ v_HLD
        out_THD[begin : begin + count] = out_HTD.transpose(0, 1).to(q_THD.dtype)
        begin += count
    return out_THD


def _gather(cache_NKSD: Tensor, table: Tensor, length: int) -> Tensor:
    """Keys or values of one row in order, float32 [K, length, D]."""
    blocks_BKSD = cache_NKSD[table].float()
    return blocks_BKSD.transpose(0, 1).flatten(1, 2)[:, :length]
