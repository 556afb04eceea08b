"""One tile of keys and values of the paged cache against a tile of queries: the inner step of both attention kernels.

The softmax runs online (Milakov and Gimelshein 2018; Dao et al. 2022) with scores in units of log 2.
Legend: M queries of the tile, L keys of the tile, DP head size up to a power of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from troth.ops.impl.triton_elementary import tanh


@triton.jit
def load_queries(q: tl.tensor, at: tl.tensor, inside: tl.tensor, D: tl.constexpr, DP: tl.constexpr) -> tl.tensor:
    """[M, DP] of the rows that begin at ``at``, zero where not ``inside`` and past D."""
    d = tl.arange(0, DP)
    return tl.load(q + at[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def attend_tile(
    q: tl.tensor,
    position: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    block_stride: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    low: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    best: tl.tensor,
    mass: tl.tensor,
    acc: tl.tensor,
    D: tl.constexpr,
    DP: tl.constexpr,
    L: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKED: tl.constexpr,
    ORDERED: tl.constexpr = False,
    SCALED: tl.constexpr = False,
    k_scale_head: tl.tensor = None,
    v_scale_head: tl.tensor = None,
) -> tl.tensor:
    """Take in keys ``first`` .. ``first + L - 1`` of a row.

    Args:
        q: [M, DP].
        position: int32 [M], of each query in its row.
        k_head: keys of the head in block 0.
        v_head: values of the head in block 0.
        block_stride: from block to block, the same in both caches; that of scales is a D-th.
        table: the row's blocks.
        first: a multiple of SLOTS.
        low: no query sees a key before it; such keys may lie in blocks that are gone.
        length: keys of the row; what lies past them may be anything.
        scale: of scores, times log2(e).
        softcap: as ops.attention, used if SOFTCAP.
        window: as ops.attention, used if WINDOW.
        best: float32 [M], the largest score so far.
        mass: float32 [M], sum of 2^(score - best).
        acc: float32 [M, DP], sum of 2^(score - best) value.
        MASKED: whether some query may not see some key; false saves the masks.
        ORDERED: whether ``mass``, too, must not depend on how the tile lies in registers.
        SCALED: whether keys and values are codes with a scale each.
        k_scale_head: scales of the head's keys in block 0, if SCALED.
        v_scale_head: of its values.

    Returns:
        best, mass, acc.
    """
    d = tl.arange(0, DP)
    token = first + tl.arange(0, L)
    block = tl.maximum(tl.load(table + token // SLOTS, mask=token < length, other=0), 0)
    at = block.to(tl.int64) * block_stride
    offset = token % SLOTS
    # 16 keys lie side by side: telling so makes 16-byte loads of them.
    k_at = tl.max_contiguous(tl.multiple_of(at + offset, SLOTS), SLOTS)
    k_pointers = k_head + (d * SLOTS)[:, None] + k_at[None, :]
    v_pointers = v_head + (at + offset * D)[:, None] + d[None, :]
    if DP == D:
        k = tl.load(k_pointers)
        v = tl.load(v_pointers)
    else:
        k = tl.load(k_pointers, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_pointers, mask=(d < D)[None, :], other=0.0)
    score = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    v = v.to(q.dtype)
    if SCALED:
        # One scale for a key: it may as well multiply the score.
        scale_at = block * (block_stride // D) + offset
        score = score * tl.load(k_scale_head + scale_at)[None, :]
        v_scale = tl.load(v_scale_head + scale_at)
    if SOFTCAP:
        # The scale is in units of log 2 for the exponentials below; the cap is not.
        score = softcap * tanh(score * (scale * 0.6931471805599453) / softcap) * 1.4426950408889634
    else:
        score = score * scale
    if MASKED:
        seen = (token[None, :] <= position[:, None]) & (token < length)[None, :]
        if WINDOW:
            seen = seen & (token[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        # 0 times a NaN is a NaN: what nobody sees must not be read.
        held = (token >= low) & (token < length)
        v = tl.where(held[:, None], v, 0.0)
        if SCALED:
            v_scale = tl.where(held, v_scale, 0.0)
    new_best = tl.maximum(best, tl.max(score, axis=1))
    finite = tl.where(new_best == float("-inf"), 0.0, new_best)
    decay = tl.exp2(best - finite)
    p = tl.exp2(score - finite[:, None])
    if ORDERED:
        # The matrix unit adds in one order; its columns are all the same.
        added = tl.dot(p.to(q.dtype), tl.full([L, 16], 1.0, tl.float32).to(q.dtype), input_precision="ieee")
        mass = mass * decay + tl.max(added, axis=1)
    else:
        mass = mass * decay + tl.sum(p, axis=1)
    if SCALED:
        if q.dtype == tl.float16:
            # A weight times a scale may be smaller than what float16 can tell.
            v = (v.to(tl.float32) * v_scale[:, None]).to(q.dtype)
        else:
            p = p * v_scale[None, :]
    acc = acc * decay[:, None] + tl.dot(p.to(q.dtype), v, input_precision="ieee")
    return new_best, mass, acc


@triton.jit
def normalised(mass: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """[M, DP]: the weighted mean; zero where nothing was seen."""
    return acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
