"""The gated delta rule: linear attention whose state decays and is corrected towards each new value.

Per row and value head, with state S (D x E), decay a, learning rate b, unit vectors q and k:

    S <- a S;   u = b (v - S^T k);   S <- S + k u^T;   out = S^T q / sqrt(D)

Of a draft, a, k and u go to the row's trail: once it is known to be right, S <- a S + k u^T takes it in, in the same
operations on the same numbers as if it had been no draft.
Reference: Yang, Kautz, Hatamizadeh 2024 (Gated DeltaNet).
Legend: T tokens, G key heads, H value heads (H / G share a key head), D key size, E value size, W = 2 G D + H E,
N rows of the persistent batch, L drafts of a trail, F = G D + H E + H: k, u and a of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.grid import (
    DRAFT_STEPS,
    SINGLE_STEPS,
    TIMED_STATE_STEPS,
    Case,
    DraftStep,
    Inputs,
    RowSpec,
    StateStep,
    sizes,
)
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


@dataclass(frozen=True, slots=True)
class Decay:
    """How a layer turns numbers x into decays: exp(-rate * softplus(x + bias)) per value head (Gu and Dao 2023)."""

    rate_H: Tensor
    """float32 [H], positive."""
    bias_H: Tensor
    """float32 [H]."""

    def logs(self, x_TH: Tensor) -> Tensor:
        """Their logarithms, float32 [T, H]."""
        return F.softplus(x_TH.float() + self.bias_H).mul_(-self.rate_H)


def _grid() -> Iterator[Case]:
    for (step, specs), heads in product(_STEPS.items(), _HEADS):
        yield Case(f"{step}-{sizes(*heads)}", partial(arguments, specs, heads))
    for (step, drafts), heads in product(DRAFT_STEPS.items(), _HEADS[:3]):
        yield Case(f"{step}-{sizes(*heads)}", partial(arguments, drafts, heads))
    for step, timed in TIMED_STATE_STEPS.items():
        yield Case(f"{step}-{sizes(*_TIMED_HEADS)}", partial(arguments, timed, _TIMED_HEADS), timed=True)


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
    beta_TH: Tensor,
    decay_TH: Tensor,
    decay: Decay,
    state_NHDE: Tensor,
    trail_NLF: Tensor,
    rows: Rows,
) -> Tensor:
    """Run the recurrence over each row's new tokens.

    Args:
        qkv_TW: float [T, W]: query heads, key heads, value heads; queries and keys not yet of unit length.
        num_key_heads: G; H, D and E follow from the state.
        beta_TH: float [T, H]; b is its sigmoid. Tokens may be strided, as those of ``decay_TH``.
        decay_TH: float [T, H]; a is what ``decay`` makes of it.
        decay: of the layer.
        state_NHDE: float32 [N, H, D, E]. Read where the row has computed tokens; a row that starts at 0 starts from
            zeros, whatever its state holds. Overwritten in place, with the state before any draft.
        trail_NLF: float32 [N, L, F]: of each draft of the row's last step unit keys [G, D], corrections [H, E] and
            decays [H]. Read where a row recalls, overwritten where one verifies.
        rows: which tokens belong to which row.

    Returns:
        float [T, H, E], dtype of qkv; computed in float32, rounded once.
    """
    q_THD, k_THD, v_THE = unit_heads(qkv_TW, num_key_heads, state_NHDE)
    log_decay_TH, rate_TH = decay.logs(decay_TH), beta_TH.float().sigmoid()
    out_THE = torch.empty_like(v_THE)
    begin = 0
    for r in range(rows.num_rows):
        state_HDE, trail_LF = state_NHDE[rows.rows[r]], trail_NLF[rows.rows[r]]
        if rows.starts[r] == 0:
            state_HDE.zero_()
        recall(state_HDE, trail_LF[: rows.recalls.get(r, 0)], num_key_heads)
        end = begin + rows.num_new[r]
        for t in range(begin, end):
            if r in rows.verifying and t == begin + 1:
                state_HDE = state_HDE.clone()
            decay_H = log_decay_TH[t].exp()
            state_HDE.mul_(decay_H[:, None, None])
            known_HE = torch.einsum("hde,hd->he", state_HDE, k_THD[t])
            u_HE = rate_TH[t][:, None] * (v_THE[t] - known_HE)
            state_HDE.add_(torch.einsum("hd,he->hde", k_THD[t], u_HE))
            out_THE[t] = torch.einsum("hde,hd->he", state_HDE, q_THD[t])
            if r in rows.verifying and t > begin:
                note_draft(trail_LF[t - begin - 1], k_THD[t], u_HE, decay_H, num_key_heads)
        begin = end
    return out_THE.to(qkv_TW.dtype)


def note_draft(trail_F: Tensor, k_HD: Tensor, u_HE: Tensor, decay_H: Tensor, num_key_heads: int) -> None:
    """Write what a trail keeps of one draft: float32 [F], from unit keys as ``unit_heads`` gives them."""
    k_GD = k_HD[:: k_HD.shape[0] // num_key_heads]
    torch.cat((k_GD.flatten(), u_HE.flatten(), decay_H), out=trail_F)


def recall(state_HDE: Tensor, trail_AF: Tensor, num_key_heads: int) -> None:
    """Take A right drafts into a row's state, in place."""
    num_heads, key_dim, value_dim = state_HDE.shape
    for trail_F in trail_AF:
        k, u, decay_H = trail_F.split([num_key_heads * key_dim, num_heads * value_dim, num_heads])
        k_HD = k.view(num_key_heads, key_dim).repeat_interleave(num_heads // num_key_heads, dim=0)
        u_HE = u.view(num_heads, value_dim)
        state_HDE.mul_(decay_H[:, None, None]).add_(k_HD[:, :, None] * u_HE[:, None, :])


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


def trail_size(num_key_heads: int, num_heads: int, key_dim: int, value_dim: int) -> int:
    """F: numbers that a trail keeps of one draft."""
    return num_key_heads * key_dim + num_heads * value_dim + num_heads


def arguments(step: StateStep, heads: tuple[int, int, int, int], inputs: Inputs) -> tuple[Any, ...]:
    """One call's arguments: ``heads`` are key heads, value heads, key size and value size."""
    key_heads, num_heads, key_dim, value_dim = heads
    drafts = step if isinstance(step, DraftStep) else DraftStep(step)
    specs = drafts.specs
    rows = drafts.rows(inputs.device)
    num_tokens = sum(rows.num_new)
    # Shifted, so that the keys of a row are alike, as they are behind a SiLU.
    qkv_TW = inputs.normal(num_tokens, 2 * key_heads * key_dim + num_heads * value_dim) + 0.7
    # Slices of a wider product, as they arrive. From forgetting at once to hardly at all.
    beta_TH, decay_TH = inputs.normal(num_tokens, 2 * num_heads + 3)[:, : 2 * num_heads].mul_(2).chunk(2, dim=-1)
    decay = Decay(inputs.uniform(-4, 1.5, num_heads).exp(), inputs.uniform(-3, 1, num_heads))
    state_NHDE = inputs.state(specs, heads[1:]) * 0.3
    trail_NLF = inputs.trail(specs, drafts.recalls, (trail_size(*heads),))
    trail_NLF[..., -num_heads:].sigmoid_()
    return qkv_TW, key_heads, beta_TH, decay_TH, decay, state_NHDE, trail_NLF, rows
