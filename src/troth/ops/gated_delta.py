"""The gated delta rule: linear attention whose state decays and is corrected towards each new value.

Per row and value head, with state S (D x E), decay a = exp(log_decay), learning rate b, unit vectors q and k:

    S <- a S;   S <- S + k (b (v - S^T k))^T;   out = S^T q / sqrt(D)

Reference: Yang, Kautz, Hatamizadeh 2024 (Gated DeltaNet).
Legend: T tokens, G key heads, H value heads (H / G share a key head), D key size, E value size, W = 2 G D + H E,
N rows of the persistent batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.grid import SINGLE_STEPS, TIMED_STEPS, Case, Inputs, RowSpec, rows_of, sizes
from troth.ops.registry import Tolerance, op
from troth.ops.rows import Rows

NORM_EPS: Final = 1e-6
"""Added to the sum of squares of a query or key before its root is taken."""

_STEPS: Final[dict[str, Sequence[RowSpec]]] = {
    **SINGLE_STEPS,
    "prompt": [(1, 0, 63)],
    "one-chunk-prompt": [(1, 0, 64)],
    "continued-prompt": [(1, 7, 65)],
    "three-chunks": [(1, 1, 150)],
    "mixed": [(4, 2, 1), (1, 0, 1), (0, 0, 17), (3, 1, 70)],
}
_HEADS: Final = ((1, 1, 32, 32), (2, 4, 16, 24), (3, 9, 64, 64), (2, 2, 128, 128))
"""Key heads, value heads, key size, value size."""
_TIMED_HEADS: Final = (16, 32, 128, 128)


def _grid() -> Iterator[Case]:
    for (step, specs), heads in product(_STEPS.items(), _HEADS):
        yield Case(f"{step}-{sizes(*heads)}", partial(arguments, specs, heads))
    for step, specs in TIMED_STEPS.items():
        yield Case(f"{step}-{sizes(*_TIMED_HEADS)}", partial(arguments, specs, _TIMED_HEADS), timed=True)


@op(
    tolerances={
        torch.float32: Tolerance(2e-5, 2e-5, "a recurrence of float32 steps solved 64 at a time"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "the output is rounded to 8 bits of mantissa"),
        torch.float16: Tolerance(2e-3, 2e-3, "the output is rounded to 11 bits of mantissa"),
    },
    grid=_grid,
)
def gated_delta(
    qkv_TW: Tensor,
    num_key_heads: int,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    state_NHDE: Tensor,
    rows: Rows,
) -> Tensor:
    """Run the recurrence over each row's new tokens.

    Args:
        qkv_TW: float [T, W]: query heads, key heads, value heads; queries and keys not yet of unit length.
        num_key_heads: G; H, D and E follow from the state.
        log_decay_TH: float32 [T, H], at most 0.
        beta_TH: float32 [T, H], in 0..1.
        state_NHDE: float32 [N, H, D, E]. Read where the row has computed tokens; a row that starts at 0 starts from
            zeros, whatever its state holds. Overwritten in place.
        rows: which tokens belong to which row.

    Returns:
        float [T, H, E], dtype of qkv; computed in float32, rounded once.
    """
    q_THD, k_THD, v_THE = unit_heads(qkv_TW, num_key_heads, state_NHDE)
    out_THE = torch.empty_like(v_THE)
    begin = 0
    for r in range(rows.num_rows):
        state_HDE = state_NHDE[rows.rows[r]]
        if rows.starts[r] == 0:
            state_HDE.zero_()
        end = begin + rows.num_new[r]
        for t in range(begin, end):
            state_HDE.mul_(log_decay_TH[t].exp()[:, None, None])
            known_HE = torch.einsum("hde,hd->he", state_HDE, k_THD[t])
            state_HDE.add_(torch.einsum("hd,he->hde", k_THD[t], beta_TH[t][:, None] * (v_THE[t] - known_HE)))
            out_THE[t] = torch.einsum("hde,hd->he", state_HDE, q_THD[t])
        begin = end
    return out_THE.to(qkv_TW.dtype)


def unit_heads(qkv_TW: Tensor, num_key_heads: int, state_NHDE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of length 1 / sqrt(D), keys of length 1, both repeated for the value heads they serve, and values.

    Returns:
        float32 [T, H, D], [T, H, D], [T, H, E].
    """
    num_heads, key_dim, value_dim = state_NHDE.shape[1:]
    num_tokens, keys = qkv_TW.shape[0], num_key_heads * key_dim
    qk, v = qkv_TW.float().split([2 * keys, num_heads * value_dim], dim=-1)
    qk = qk.reshape(num_tokens, 2, num_key_heads, key_dim)
    qk = qk * torch.rsqrt(qk.square().sum(dim=-1, keepdim=True) + NORM_EPS)
    qk = qk.repeat_interleave(num_heads // num_key_heads, dim=2)
    return qk[:, 0] * key_dim**-0.5, qk[:, 1], v.reshape(num_tokens, num_heads, value_dim)


def arguments(specs: Sequence[RowSpec], heads: tuple[int, int, int, int], inputs: Inputs) -> tuple[Any, ...]:
    """One call's arguments: ``heads`` are key heads, value heads, key size and value size."""
    key_heads, num_heads, key_dim, value_dim = heads
    rows = rows_of(specs, inputs.device)
    num_tokens = sum(rows.num_new)
    # Shifted, so that the keys of a row are alike, as they are behind a SiLU.
    qkv_TW = inputs.normal(num_tokens, 2 * key_heads * key_dim + num_heads * value_dim) + 0.7
    # From forgetting at once to hardly at all.
    log_decay_TH = -inputs.uniform(-8, 1.5, num_tokens, num_heads).exp()
    beta_TH = inputs.uniform(0, 1, num_tokens, num_heads)
    state_NHDE = inputs.state(specs, heads[1:]) * 0.3
    return qkv_TW, key_heads, log_decay_TH, beta_TH, state_NHDE, rows
