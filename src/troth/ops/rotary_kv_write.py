"""Between the qkv projection and attention: split heads, normalise, rotate, write keys and values to the cache.

Legend: T tokens, E = (H + 2 K) D, H query heads, K key-value heads, D head size, P positions, W rotated width / 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.attention import paged_kv
from troth.ops.codes import FP8
from troth.ops.grid import TIMED_STEPS, Case, Inputs, RowSpec, rows_of, sizes
from troth.ops.layer_kv import LayerKV
from troth.ops.registry import Tolerance, op
from troth.ops.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every position; the first 2 W values of a head rotate in halves (value i with value i + W)."""

    cos_PW: Tensor
    """float32 [P, W]."""
    sin_PW: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm over each query and key head, before rotation (Qwen3, Gemma 3)."""

    q_D: Tensor
    k_D: Tensor
    eps: float


_STEP: Final[Sequence[RowSpec]] = [(1, 14, 1), (0, 0, 1), (2, 13, 20)]
_HEADS: Final = ((1, 1, 32), (4, 2, 64), (9, 3, 80), (8, 1, 256))
"""Query heads, key-value heads, head size."""
_TIMED_HEADS: Final = ((9, 3, 64), (32, 8, 128))


def _grid() -> Iterator[Case]:
    for heads, share, with_norms, padding in product(_HEADS, (1.0, 0.5), (False, True), (0, 8)):
        parts = [sizes(*heads), f"{share:g}", *["norms"] * with_norms, *["strided"] * bool(padding)]
        yield Case("-".join(parts), partial(_arguments, _STEP, heads, share, with_norms, padding, None))
    for heads in _HEADS:
        for form, dtype in (("int8", torch.int8), ("fp8", FP8)):
            yield Case(f"{sizes(*heads)}-1-{form}", partial(_arguments, _STEP, heads, 1.0, True, 0, dtype))
    for (step, specs), heads in product(TIMED_STEPS.items(), _TIMED_HEADS):
        yield Case(f"{step}-{sizes(*heads)}", partial(_arguments, specs, heads, 1.0, False, 0, None), timed=True)


@op(
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5, "a float32 mean and one rotation in another order"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "one rounding of the output to 8 bits of mantissa"),
        torch.float16: Tolerance(1e-3, 2e-3, "one rounding of the output to 11 bits of mantissa"),
    },
    grid=_grid,
)
def rotary_kv_write(
    qkv_TE: Tensor,
    num_heads: int,
    positions_T: Tensor,
    rotary: RotaryTable,
    norms: HeadNorms | None,
    slots_T: Tensor,
    kv: LayerKV,
) -> Tensor:
    """Prepare queries and store keys and values.

    Args:
        qkv_TE: float [T, E]: all query heads, then key heads, then value heads.
        num_heads: H; K follows from the cache.
        positions_T: int64 [T], rows of the rotary table.
        rotary: the table.
        norms: head norms, or None.
        slots_T: int64 [T], where each token's key and value go.
        kv: written in place at those slots, in its own format.

    Returns:
        Rotated queries, float [T, H, D], dtype of qkv.
    """
    num_kv_heads, head_dim = kv.k_NKDS.shape[1], kv.k_NKDS.shape[2]
    heads = qkv_TE.view(qkv_TE.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q_THD, k_TKD, v_TKD = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q_THD = rms_norm.reference(q_THD.float(), norms.q_D, norms.eps)
        k_TKD = rms_norm.reference(k_TKD.float(), norms.k_D, norms.eps)
    cos_T1W = rotary.cos_PW[positions_T].unsqueeze(1)
    sin_T1W = rotary.sin_PW[positions_T].unsqueeze(1)
    kv.write(slots_T, _rotate(k_TKD.float(), cos_T1W, sin_T1W), v_TKD)
    return _rotate(q_THD.float(), cos_T1W, sin_T1W).to(qkv_TE.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [T, heads, D] with its first 2 W values turned by angles of ``cos`` and ``sin`` [T, 1, W]."""
    width = cos.shape[-1]
    first, second, rest = x[..., :width], x[..., width : 2 * width], x[..., 2 * width :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _arguments(
    specs: Sequence[RowSpec],
    heads: tuple[int, int, int],
    share: float,
    with_norms: bool,
    padding: int,
    kv_dtype: torch.dtype | None,
    inputs: Inputs,
) -> tuple[Any, ...]:
    """``share`` of each head rotates; ``padding`` values lie between one token's and the next's."""
    num_heads, num_kv_heads, head_dim = heads
    kv, _, slots_T = paged_kv(inputs, rows_of(specs, inputs.device), num_kv_heads, head_dim, dtype=kv_dtype)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv_TE = inputs.normal(len(slots_T), width + padding)[:, :width]
    positions = [position for _, start, count in specs for position in range(start, start + count)]
    angle_PW = torch.arange(max(positions) + 1)[:, None] * 0.5 ** torch.arange(int(head_dim * share) // 2)
    # Longer than 1, as YaRN makes them.
    rotary = RotaryTable(angle_PW.cos().mul_(1.1).to(inputs.device), angle_PW.sin().mul_(1.1).to(inputs.device))
    norms = None
    if with_norms:
        norms = HeadNorms(inputs.uniform(0.5, 1.5, head_dim), inputs.uniform(0.5, 1.5, head_dim), 1e-6)
    return qkv_TE, num_heads, torch.tensor(positions, device=inputs.device), rotary, norms, slots_T, kv
