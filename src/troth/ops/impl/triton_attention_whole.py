"""Attention of a long prompt computed whole: its keys and values are laid out anew for cuDNN's fused kernel.

Moving them costs a fiftieth of the attention of 8,192 tokens; that kernel is twice as fast as any that reads blocks.
PyTorch keeps a plan for every length it has met, makes each anew in tens of milliseconds and forgets none: lengths are
rounded up, and what was added is seen by nobody.
Legend: L tokens of the prompt, rounded up, B its blocks, H query heads, K key-value heads, D head size, S = 16 slots.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.impl.triton import power_of_2, scales_of
from troth.ops.layer_kv import LayerKV
from troth.ops.rows import Rows

LEAST_TOKENS: Final = 1024
"""Shorter prompts are not worth the moving."""
ROUNDED_TOKENS: Final = 256
"""Lengths are multiples of it: some thirty plans up to a step's 8,192 tokens."""
MOST_HEAD: Final = 128
HEAD_MULTIPLE: Final = 8


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["table"])
def _gather(
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    table: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    length: tl.tensor,
    K: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    index, head = tl.program_id(0), tl.program_id(1)
    block = tl.maximum(tl.load(table + index, mask=index * SLOTS < length, other=0), 0).to(tl.int64)
    s, d = tl.arange(0, SLOTS), tl.arange(0, DP)
    at = (block * K + head) * (D * SLOTS)
    inside = (d < D)[None, :]
    token = index * SLOTS + s
    held = (token < length)[:, None]
    out_at = (token.to(tl.int64) * K + head)[:, None] * D + d[None, :]
    k = tl.load(k_cache + at + (d * SLOTS)[:, None] + s[None, :], mask=(d < D)[:, None], other=0.0)
    v = tl.load(v_cache + at + (s * D)[:, None] + d[None, :], mask=inside, other=0.0)
    if SCALED:
        scale_at = (block * K + head) * SLOTS + s
        k = k.to(tl.float32) * tl.load(k_scales + scale_at)[None, :]
        v = v.to(tl.float32) * tl.load(v_scales + scale_at)[:, None]
    # What lies past the row's end may be anything, and 0 times a NaN is a NaN.
    tl.store(k_out + out_at, tl.where(held, tl.trans(k), 0.0).to(k_out.dtype.element_ty), mask=inside)
    tl.store(v_out + out_at, tl.where(held, v, 0.0).to(v_out.dtype.element_ty), mask=inside)


def gather(kv: LayerKV, block_table_B: Tensor, length: int, rounded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of a row's first ``length`` tokens, in order, then zeros: ``dtype`` [rounded, K, D] each."""
    num_kv_heads, head_dim = kv.k_NKDS.shape[1], kv.k_NKDS.shape[2]
    k_LKD, v_LKD = torch.empty(2, rounded, num_kv_heads, head_dim, dtype=dtype, device=kv.k_NKDS.device)
    _gather[(rounded // BLOCK_TOKENS, num_kv_heads)](
        kv.k_NKDS,
        kv.v_NKSD,
        *scales_of(kv),
        block_table_B,
        k_LKD,
        v_LKD,
        length,
        K=num_kv_heads,
        D=head_dim,
        DP=power_of_2(head_dim),
        SLOTS=BLOCK_TOKENS,
        SCALED=kv.k_scale_NKS is not None,
        num_warps=4,
    )
    return k_LKD, v_LKD


def takes_whole(q_THD: Tensor, kv: LayerKV, rows: Rows, row: int, window: int | None, softcap: float | None) -> bool:
    """Whether this row is a long prompt from its first token on, of a kind that cuDNN computes."""
    num_new, head_dim = rows.num_new[row], q_THD.shape[2]
    return (
        num_new >= LEAST_TOKENS
        and rows.starts[row] == 0
        and softcap is None
        and (window is None or window >= num_new)
        and q_THD.is_cuda
        and q_THD.dtype != torch.float32
        and head_dim <= MOST_HEAD
        and head_dim % HEAD_MULTIPLE == 0
    )


def attend_whole(q_THD: Tensor, kv: LayerKV, block_table_B: Tensor, scale: float) -> Tensor:
    """Causal attention of a whole prompt: float [T, H, D]."""
    length = q_THD.shape[0]
    rounded = -(-length // ROUNDED_TOKENS) * ROUNDED_TOKENS
    k_LKD, v_LKD = gather(kv, block_table_B, length, rounded, q_THD.dtype)
    q_LHD = q_THD if rounded == length else F.pad(q_THD, (0, 0, 0, 0, 0, rounded - length))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_LHD, k_LKD, v_LKD))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y.squeeze(0).transpose(0, 1)[:length]
