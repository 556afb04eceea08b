"""Attention of new tokens over a paged KV cache that already holds their keys and values.

Legend: T tokens, R rows, B blocks per row, N blocks in the pool, H query heads, K key-value heads, G = H / K,
S = 16 slots of a block, D head size, L keys seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.codes import FP8, LARGEST
from troth.ops.grid import TIMED_STEPS, Case, Inputs, RowSpec, rows_of, sizes
from troth.ops.layer_kv import LayerKV
from troth.ops.registry import Tolerance, op
from troth.ops.rows import Rows

_STEPS: Final[dict[str, Sequence[RowSpec]]] = {
    "one-single": [(0, 36, 1)],
    "first-token": [(0, 0, 1)],
    "equal-singles": [(2, 31, 1), (0, 31, 1)],
    "uneven-singles": [(1, 0, 1), (3, 15, 1), (0, 16, 1), (2, 70, 1)],
    "prompt": [(0, 0, 21)],
    "one-block-prompt": [(0, 0, 16)],
    "continued-prompt": [(0, 19, 15)],
    "mixed": [(3, 40, 1), (1, 3, 1), (0, 0, 33), (2, 30, 2)],
}
_LONG_STEP: Final = [(1, 299, 1), (0, 530, 1), (2, 280, 3)]
"""Contexts of several segments of 256 keys, in which providers fetch ahead and share work out."""
_LONG_HEADS: Final = ((2, 2, 64), (4, 2, 128), (8, 1, 64))
_LONG_WINDOWS: Final = (None, 40, 290)
_HEADS: Final = ((1, 1, 32), (4, 2, 64), (9, 3, 80), (8, 1, 128), (3, 3, 256))
"""Query heads, key-value heads, head size."""
_CODED: Final = {"int8": (torch.int8, _HEADS), "fp8": (FP8, _HEADS[:3])}
"""Caches of codes, and the heads of their cases."""
_TIMED_HEADS: Final = ((9, 3, 64), (32, 8, 128))
_WINDOWS: Final = (None, 1, 7, 16, 17, 64)
_CODED_WINDOWS: Final = (None, 17)


def _grid() -> Iterator[Case]:
    for (step, specs), heads, window in product(_STEPS.items(), _HEADS, _WINDOWS):
        yield Case(f"{step}-{sizes(*heads)}-window-{window}", partial(_arguments, specs, heads, window, None))
    for heads, window in product(_LONG_HEADS, _LONG_WINDOWS):
        for form, dtype in (("", None), ("-int8", torch.int8)):
            yield Case(
                f"long-{sizes(*heads)}-window-{window}{form}", partial(_arguments, _LONG_STEP, heads, window, dtype)
            )
    for (form, (dtype, some_heads)), (step, specs), window in product(_CODED.items(), _STEPS.items(), _CODED_WINDOWS):
        for heads in some_heads:
            name = f"{step}-{sizes(*heads)}-window-{window}-{form}"
            yield Case(name, partial(_arguments, specs, heads, window, dtype))
    for (step, specs), heads in product(TIMED_STEPS.items(), _TIMED_HEADS):
        yield Case(f"{step}-{sizes(*heads)}", partial(_arguments, specs, heads, None, None), timed=True)
        for form, (dtype, _) in _CODED.items():
            yield Case(f"{step}-{sizes(*heads)}-{form}", partial(_arguments, specs, heads, None, dtype), timed=True)


@op(
    tolerances={
        torch.float32: Tolerance(2e-5, 2e-5, "sums of up to a few thousand float32 products in another order"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "the output is rounded to 8 bits of mantissa"),
        torch.float16: Tolerance(2e-3, 2e-3, "the output is rounded to 11 bits of mantissa"),
    },
    grid=_grid,
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
        k_KLD = _in_order(kv.keys(table).transpose(2, 3), length - first * BLOCK_TOKENS)
        v_KLD = _in_order(kv.values(table), length - first * BLOCK_TOKENS)
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


def _in_order(blocks_BKSD: Tensor, length: int) -> Tensor:
    """Keys or values of one row's blocks, side by side: float32 [K, length, D]."""
    return blocks_BKSD.float().transpose(0, 1).flatten(1, 2)[:, :length]


def paged_kv(
    inputs: Inputs,
    rows: Rows,
    num_kv_heads: int,
    head_dim: int,
    window: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[LayerKV, Tensor, Tensor]:
    """A pool for a step of a grid: its blocks lie in no order, and it is NaN where no token of a row's context is.

    Args:
        inputs: makes the numbers.
        rows: of the step.
        num_kv_heads: K.
        head_dim: D.
        window: blocks before it are not held; None: all are.
        dtype: of the pool; None: of activations. Of codes, NaN are the scales.

    Returns:
        the pool; the block table, int32 [R, B], -1 where nothing is held (before the window, after the end); the
        slots of the new tokens, int64 [T].
    """
    lengths = [start + count for start, count in zip(rows.starts, rows.num_new, strict=True)]
    width = -(-max(lengths) // BLOCK_TOKENS)
    num_blocks = rows.num_rows * width + 3
    kv = _unwritten_kv((num_blocks, num_kv_heads, head_dim), dtype or inputs.dtype, inputs.device)
    free = inputs.order(num_blocks)
    table_RB = torch.full((rows.num_rows, width), -1, dtype=torch.int32)
    slots: list[Tensor] = []
    for r, (start, length) in enumerate(zip(rows.starts, lengths, strict=True)):
        first = 0 if window is None else max(0, start - window + 1) // BLOCK_TOKENS
        for index in range(first, -(-length // BLOCK_TOKENS)):
            table_RB[r, index] = free.pop()
        position_L = torch.arange(first * BLOCK_TOKENS, length)
        slot_L = table_RB[r, position_L // BLOCK_TOKENS].long() * BLOCK_TOKENS + position_L % BLOCK_TOKENS
        k_LKD, v_LKD = (inputs.normal(len(position_L), num_kv_heads, head_dim) for _ in "kv")
        kv.write(slot_L.to(inputs.device), k_LKD, v_LKD)
        slots.append(slot_L[position_L >= start])
    return kv, table_RB.to(inputs.device), torch.cat(slots).to(inputs.device)


def _unwritten_kv(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> LayerKV:
    """A pool (N, K, D) that holds nothing that a result may be made of."""
    num_blocks, num_kv_heads, head_dim = shape
    nothing = 0.0 if dtype == torch.int8 else torch.nan
    k_NKDS = torch.full((num_blocks, num_kv_heads, head_dim, BLOCK_TOKENS), nothing, device=device).to(dtype)
    v_NKSD = torch.full((num_blocks, num_kv_heads, BLOCK_TOKENS, head_dim), nothing, device=device).to(dtype)
    if dtype not in LARGEST:
        return LayerKV(k_NKDS, v_NKSD)
    k_scale_NKS, v_scale_NKS = torch.full((2, num_blocks, num_kv_heads, BLOCK_TOKENS), torch.nan, device=device)
    return LayerKV(k_NKDS, v_NKSD, k_scale_NKS, v_scale_NKS)


def _arguments(
    specs: Sequence[RowSpec],
    heads: tuple[int, int, int],
    window: int | None,
    kv_dtype: torch.dtype | None,
    inputs: Inputs,
) -> tuple[Any, ...]:
    num_heads, num_kv_heads, head_dim = heads
    rows = rows_of(specs, inputs.device)
    kv, table_RB, slots_T = paged_kv(inputs, rows, num_kv_heads, head_dim, window, kv_dtype)
    return inputs.normal(len(slots_T), num_heads, head_dim), kv, table_RB, rows, head_dim**-0.5, window
