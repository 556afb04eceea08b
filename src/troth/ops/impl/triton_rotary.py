"""Head norms, rotation and the cache write between projection and attention, in one Triton kernel.

A program takes one head of a few tokens. Queries come back rotated; keys and values go to their slots. A negative slot
is not written: padding of a captured step.
Legend: T tokens, E = (H + 2 K) D, H query heads, K key-value heads, D head size, W rotated pairs.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.impl.triton import power_of_2, scales_of, takes, takes_cache
from troth.ops.impl.triton_codes import to_codes
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.layer_kv import LayerKV
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write

CHUNK_TOKENS: Final = 16
"""Tokens per program in chunks: keys of a block lie side by side, so 16 tokens fill whole sectors of memory."""
FEW_TOKENS: Final = ((1, 1), (64, 2), (512, 4))
"""Most tokens of a step, and tokens per program: decode steps, whose tokens lie in different blocks. On an H200 32 rows
take 2.2 us (one token each: 2.6), 128 rows 3.7 (two: 4.3)."""


@triton.jit(do_not_specialize=["num_tokens"])
def _rotary_kv_write(
    qkv: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    slots: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    out: tl.tensor,
    qkv_stride: tl.tensor,
    num_tokens: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    DP: tl.constexpr,
    TOKENS: tl.constexpr,
    NORMS: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, DP)
    inside = (t < num_tokens)[:, None] & (d < D)[None, :]
    row = qkv + t[:, None] * qkv_stride + head * D
    slot = tl.load(slots + t, mask=t < num_tokens, other=-1)
    stored = (t < num_tokens) & (slot >= 0)
    written = inside & stored[:, None]
    block, offset = slot // SLOTS, slot % SLOTS
    given = tl.load(row + d[None, :], mask=inside, other=0.0)
    if head >= H + K:
        token_at = (block * K + (head - H - K)) * SLOTS + offset
        v_at = v_cache + (token_at * D)[:, None] + d[None, :]
        if SCALED:
            codes, scale = to_codes(given.to(tl.float32), v_cache.dtype.element_ty)
            tl.store(v_at, codes, mask=written)
            tl.store(v_scales + token_at, scale, mask=stored)
        else:
            tl.store(v_at, given.to(v_cache.dtype.element_ty), mask=written)
    else:
        # Value i turns with value i + W, those from 2 W on stay.
        other_d = tl.where(d < W, d + W, d - W)
        turns = inside & (d < 2 * W)[None, :]
        x = given.to(tl.float32)
        other = tl.load(row + other_d[None, :], mask=turns, other=0.0).to(tl.float32)
        if NORMS:
            norm = q_norm if head < H else k_norm
            scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / D + eps)
            x = x * scale[:, None] * tl.load(norm + d, mask=d < D, other=0.0)[None, :]
            other = other * scale[:, None] * tl.load(norm + other_d, mask=d < 2 * W, other=0.0)[None, :]
        position = tl.maximum(tl.load(positions + t, mask=t < num_tokens, other=0), 0)
        angle = position[:, None] * W + (d % W)[None, :]
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
        x = x * c + tl.where(d < W, -1.0, 1.0)[None, :] * other * s
        if head < H:
            at = (t * H + head) * D
            tl.store(out + at[:, None] + d[None, :], x.to(out.dtype.element_ty), mask=inside)
        else:
            head_at = (block * K + (head - H)) * SLOTS
            k_at = k_cache + (head_at * D + offset)[:, None] + (d * SLOTS)[None, :]
            if SCALED:
                codes, scale = to_codes(x, k_cache.dtype.element_ty)
                tl.store(k_at, codes, mask=written)
                tl.store(k_scales + head_at + offset, scale, mask=stored)
            else:
                tl.store(k_at, x.to(k_cache.dtype.element_ty), mask=written)


def takes_rotary(
    qkv_TE: Tensor,
    num_heads: int,
    positions_T: Tensor,
    rotary: RotaryTable,
    norms: HeadNorms | None,
    slots_T: Tensor,
    kv: LayerKV,
) -> bool:
    """Whether the kernel computes such a call."""
    return takes(qkv_TE) and qkv_TE.stride(-1) == 1 and takes_cache(kv)


@rotary_kv_write.provider("triton", supports=takes_rotary)
def rotary_kv_write_triton(
    qkv_TE: Tensor,
    num_heads: int,
    positions_T: Tensor,
    rotary: RotaryTable,
    norms: HeadNorms | None,
    slots_T: Tensor,
    kv: LayerKV,
) -> Tensor:
    """As ops.rotary_kv_write; tokens whose slot is negative are not stored. Addresses are not checked otherwise."""
    tokens = next((few for most, few in FEW_TOKENS if qkv_TE.shape[0] <= most), CHUNK_TOKENS)
    return rotate_and_write(qkv_TE, num_heads, positions_T, rotary, norms, slots_T, kv, tokens)


def rotate_and_write(
    qkv_TE: Tensor,
    num_heads: int,
    positions_T: Tensor,
    rotary: RotaryTable,
    norms: HeadNorms | None,
    slots_T: Tensor,
    kv: LayerKV,
    tokens: int,
) -> Tensor:
    """The same, with ``tokens`` per program."""
    num_tokens = qkv_TE.shape[0]
    num_kv_heads, head_dim = kv.k_NKDS.shape[1], kv.k_NKDS.shape[2]
    q_THD = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv_TE.dtype, device=qkv_TE.device)
    # Without norms their addresses are never read.
    q_norm_D, k_norm_D = (norms.q_D, norms.k_D) if norms is not None else (rotary.cos_PW, rotary.cos_PW)
    _rotary_kv_write[(triton.cdiv(num_tokens, tokens), num_heads + 2 * num_kv_heads)](
        qkv_TE,
        positions_T,
        rotary.cos_PW,
        rotary.sin_PW,
        q_norm_D,
        k_norm_D,
        slots_T,
        kv.k_NKDS,
        kv.v_NKSD,
        *scales_of(kv),
        q_THD,
        qkv_TE.stride(0),
        num_tokens,
        norms.eps if norms is not None else 0.0,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        W=rotary.cos_PW.shape[1],
        DP=power_of_2(head_dim),
        TOKENS=tokens,
        NORMS=norms is not None,
        SLOTS=BLOCK_TOKENS,
        SCALED=kv.k_scale_NKS is not None,
        num_warps=4 if tokens == CHUNK_TOKENS else 1,
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
    )
    return q_THD
