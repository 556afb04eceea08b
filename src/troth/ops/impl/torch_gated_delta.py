"""The gated delta rule without a loop over tokens: single tokens of all rows together, chunks solved 64 at a time.

Within a chunk of C tokens, with c_i the sum of log decays up to i, the corrections u_i = b_i (v_i - S^T k_i) obey

    u_i = b_i v_i - b_i exp(c_i) S_0^T k_i - sum over j < i of b_i exp(c_i - c_j) (k_i . k_j) u_j

a unit lower triangular system, solved in one go for the terms with and without S_0 (Yang et al. 2024, UT transform);
then out_i = exp(c_i) S_0^T q_i + sum over j <= i of exp(c_i - c_j) (q_i . k_j) u_j, and S_0 moves on.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.gated_delta import Decay, gated_delta, note_draft, recall, unit_heads
from troth.ops.rows import Rows

CHUNK: Final = 64


@gated_delta.provider("torch")
def gated_delta_torch(
    qkv_TW: Tensor,
    num_key_heads: int,
    beta_TH: Tensor,
    decay_TH: Tensor,
    decay: Decay,
    state_NHDE: Tensor,
    trail_NLF: Tensor,
    rows: Rows,
) -> Tensor:
    """As ops.gated_delta."""
    for r, count in rows.recalls.items():
        recall(state_NHDE[rows.rows[r]], trail_NLF[rows.rows[r], :count], num_key_heads)
    q_THD, k_THD, v_THE = unit_heads(qkv_TW, num_key_heads, state_NHDE)
    log_decay_TH, beta_TH = decay.logs(decay_TH), beta_TH.float().sigmoid()
    out_THE = torch.empty(v_THE.shape, dtype=qkv_TW.dtype, device=qkv_TW.device)
    single = rows.num_single
    if single:
        q_RHD, k_RHD, v_RHE = q_THD[:single], k_THD[:single], v_THE[:single]
        decay_RH, beta_RH = log_decay_TH[:single].exp(), beta_TH[:single]
        out_THE[:single] = _decode(q_RHD, k_RHD, v_RHE, decay_RH, beta_RH, state_NHDE, rows)
    begin = single
    for r in range(single, rows.num_rows):
        end = begin + rows.num_new[r]
        state_HDE = state_NHDE[rows.rows[r]]
        if r in rows.verifying:
            trail_LF = trail_NLF[rows.rows[r]]
            for t in range(begin, end):
                if t == begin + 1:
                    state_HDE = state_HDE.clone()
                at, decay_1H = slice(t, t + 1), log_decay_TH[t : t + 1].exp()
                out_THE[at], u_1HE = _advance(q_THD[at], k_THD[at], v_THE[at], decay_1H, beta_TH[at], state_HDE[None])
                if t > begin:
                    note_draft(trail_LF[t - begin - 1], k_THD[t], u_1HE, decay_1H[0], num_key_heads)
            begin = end
            continue
        if rows.starts[r] == 0:
            state_HDE.zero_()
        q_HTD, k_HTD, v_HTE = (x[begin:end].transpose(0, 1) for x in (q_THD, k_THD, v_THE))
        log_decay_HT, beta_HT = log_decay_TH[begin:end].T, beta_TH[begin:end].T
        out_THE[begin:end] = _chunks(q_HTD, k_HTD, v_HTE, log_decay_HT, beta_HT, state_HDE).transpose(0, 1)
        begin = end
    return out_THE


def _decode(
    q_RHD: Tensor, k_RHD: Tensor, v_RHE: Tensor, decay_RH: Tensor, beta_RH: Tensor, state_NHDE: Tensor, rows: Rows
) -> Tensor:
    count = q_RHD.shape[0]
    # Rows side by side, of which a single row is the most common case, are updated where they lie.
    place = rows.side_by_side(count)
    state_RHDE = state_NHDE[rows.row_R[:count] if place is None else place]
    if not all(rows.starts[:count]):
        state_RHDE.masked_fill_((rows.context_len_R[:count] == 1)[:, None, None, None], 0)
    out_RHE, _ = _advance(q_RHD, k_RHD, v_RHE, decay_RH, beta_RH, state_RHDE)
    if place is None:
        state_NHDE[rows.row_R[:count]] = state_RHDE
    return out_RHE


def _advance(
    q_RHD: Tensor, k_RHD: Tensor, v_RHE: Tensor, decay_RH: Tensor, beta_RH: Tensor, state_RHDE: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row; ``state`` is updated in place. Returns outputs and corrections, float32 [R, H, E]."""
    state_RHDE.mul_(decay_RH[:, :, None, None])
    # out = (S + k u^T)^T q = S^T q + (k . q) u: query and key read the state in one pass.
    read_RH2E = torch.stack((q_RHD, k_RHD), dim=2) @ state_RHDE
    u_RHE = beta_RH[:, :, None] * (v_RHE - read_RH2E[:, :, 1])
    state_RHDE.add_(k_RHD[..., :, None] * u_RHE[..., None, :])
    return read_RH2E[:, :, 0] + (q_RHD * k_RHD).sum(dim=-1, keepdim=True) * u_RHE, u_RHE


def _chunks(
    q_HTD: Tensor, k_HTD: Tensor, v_HTE: Tensor, log_decay_HT: Tensor, beta_HT: Tensor, state_HDE: Tensor
) -> Tensor:
    """One row's tokens; ``state`` is updated in place. Returns float32 [H, T, E]."""
    num_tokens, value_dim = v_HTE.shape[1:]
    size = min(CHUNK, num_tokens)
    # Padding has k = 0, b = 0 and log decay 0: it changes nothing.
    q, k, v = (_split(x, size) for x in (q_HTD, k_HTD, v_HTE))
    log_decay, beta = (_split(x[..., None], size).squeeze(-1) for x in (log_decay_HT, beta_HT))
    total = log_decay.cumsum(dim=-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill_(later, float("-inf")).exp_()
    from_start = total.exp().unsqueeze(-1)
    to_end = (total[..., -1:] - total).exp_().unsqueeze(-1)
    bk = k * beta.unsqueeze(-1)
    # solve_triangular takes the diagonal as ones and reads nothing above it.
    system = (bk @ k.transpose(-1, -2)).mul_(between)
    right = torch.cat((v * beta.unsqueeze(-1), bk * from_start), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, against = solved.split([value_dim, solved.shape[-1] - value_dim], dim=-1)
    scores = (q @ k.transpose(-1, -2)).mul_(between)
    q, k = q * from_start, (k * to_end).transpose(-1, -2)
    out = torch.empty_like(v)
    for i in range(q.shape[1]):
        u = fresh[:, i] - against[:, i] @ state_HDE
        out[:, i] = q[:, i] @ state_HDE + scores[:, i] @ u
        state_HDE.mul_(from_start[:, i, -1:]).add_(k[:, i] @ u)
    return out.flatten(1, 2)[:, :num_tokens]


def _split(x_HTD: Tensor, size: int) -> Tensor:
    """[H, T, D] -> [H, T / size, size, D], padded with zeros."""
    return F.pad(x_HTD, (0, 0, 0, -x_HTD.shape[1] % size)).unflatten(1, (-1, size))
