"""The short convolution as K shifted products: single tokens of all rows together, chunks one row at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.rows import Rows
from troth.ops.short_conv import recall, short_conv


@short_conv.provider("torch")
def short_conv_torch(
    x_TC: Tensor, weight_KC: Tensor, state_NJC: Tensor, trail_NLC: Tensor, rows: Rows, silu: bool = True
) -> Tensor:
    """As ops.short_conv."""
    for r, count in rows.recalls.items():
        recall(state_NJC[rows.rows[r]], trail_NLC[rows.rows[r], :count])
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    single = rows.num_single
    if single:
        out_TC[:single] = _decode(x_TC[:single], weight_KC, state_NJC, rows, silu)
    begin = single
    for r in range(single, rows.num_rows):
        end = begin + rows.num_new[r]
        row, x_rTC = rows.rows[r], x_TC[begin:end]
        if r in rows.verifying:
            out_TC[begin:end] = _verify(x_rTC, weight_KC, state_NJC[row], trail_NLC[row], silu)
        else:
            out_TC[begin:end] = _chunk(x_rTC, weight_KC, state_NJC[row], rows.starts[r], silu)
        begin = end
    return out_TC


def _decode(x_RC: Tensor, weight_KC: Tensor, state_NJC: Tensor, rows: Rows, silu: bool) -> Tensor:
    count = x_RC.shape[0]
    place = rows.side_by_side(count) or rows.row_R[:count]
    seen_RKC = torch.cat((state_NJC[place], x_RC.float().unsqueeze(1)), dim=1)
    if not all(rows.starts[:count]):
        seen_RKC[:, :-1].masked_fill_((rows.context_len_R[:count] == 1)[:, None, None], 0)
    state_NJC[place] = seen_RKC[:, 1:]
    return _activated((seen_RKC * weight_KC).sum(dim=1), silu)


def _verify(x_TC: Tensor, weight_KC: Tensor, state_JC: Tensor, trail_LC: Tensor, silu: bool) -> Tensor:
    """The last token of an answer and drafts: each computed as a decode, and remembered apart."""
    count = x_TC.shape[0]
    seen = torch.cat((state_JC, x_TC.float()))
    trail_LC[: count - 1] = x_TC[1:]
    state_JC.copy_(seen[1 : len(state_JC) + 1])
    seen_TKC = torch.stack([seen[k : k + count] for k in range(len(weight_KC))], dim=1)
    return _activated((seen_TKC * weight_KC).sum(dim=1), silu)


def _chunk(x_TC: Tensor, weight_KC: Tensor, state_JC: Tensor, start: int, silu: bool) -> Tensor:
    remembered, count = state_JC.shape[0], x_TC.shape[0]
    seen = torch.empty(remembered + count, x_TC.shape[1], dtype=torch.float32, device=x_TC.device)
    seen[:remembered] = state_JC if start > 0 else 0
    seen[remembered:] = x_TC
    state_JC.copy_(seen[count:])
    total_TC = seen[:count] * weight_KC[0]
    for k in range(1, remembered + 1):
        total_TC.addcmul_(seen[k : k + count], weight_KC[k])
    return _activated(total_TC, silu)


def _activated(total_TC: Tensor, silu: bool) -> Tensor:
    return F.silu(total_TC, inplace=True) if silu else total_TC
