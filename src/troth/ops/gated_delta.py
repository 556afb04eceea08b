"""The gated delta rule: linear attention whose state decays and is corrected towards each new value.

Per row and value head, with state S (D x E), decay a = exp(log_decay), learning rate b, unit vectors q and k:

    S <- a S;   S <- S + k (b (v - S^T k))^T;   out = S^T q / sqrt(D)

Reference: Yang, Kautz, Hatamizadeh 2024 (Gated DeltaNet).
Legend: T tokens, G key heads, H value heads (H / G share a key head), D key size, E value size, W = 2 G D + H E,
N rows of the persistent batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troth.ops.registry import Tolerance, op
from troth.ops.rows import Rows

NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key before its root is taken."""


@op(
    tolerances={
        torch.float32: Tolerance(2e-5, 2e-5, "a recurrence of float32 steps solved 64 at a time"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "the output is rounded to 8 bits of mantissa"),
        torch.float16: Tolerance(2e-3, 2e-3, "the output is rounded to 11 bits of mantissa"),
    }
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
