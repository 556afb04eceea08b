"""Rows of the embedding table by Triton kernels, dense or of 4 or 8 bits. Legend: T tokens, V vocabulary, D width."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.embedding import embedding
from troth.ops.impl.torch_linear import DenseLinearWeight
from troth.ops.impl.triton import FLOATS, INTERPRETED
from troth.ops.impl.triton_groups import GroupLinearWeight, rows_of_groups
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs

BLOCK: Final = 1024


@triton.jit(do_not_specialize_on_alignment=["token_ids"])
def _embedding(
    token_ids: tl.tensor,
    table: tl.tensor,
    y: tl.tensor,
    width: tl.tensor,
    factor: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    kind = y.dtype.element_ty
    row = tl.load(table + tl.load(token_ids + t) * width + d, mask=inside, other=0.0)
    # The factor multiplies what was rounded already.
    tl.store(y + t * width + d, (row.to(kind).to(tl.float32) * factor).to(kind), mask=inside)


def _takes_embedding(token_ids_T: Tensor, weight: Any, dtype: torch.dtype, scale: float = 1.0) -> bool:
    if token_ids_T.is_cuda == INTERPRETED or dtype not in FLOATS:
        return False
    return type(weight) in (DenseLinearWeight, GroupLinearWeight)


@embedding.provider("triton", supports=_takes_embedding)
def embedding_triton(token_ids_T: Tensor, weight: Any, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """As ops.embedding. Ids must be inside the table: addresses are not checked."""
    if type(weight) is GroupLinearWeight:
        return rows_of_groups(weight, token_ids_T, dtype, scale)
    num_tokens, width = token_ids_T.shape[0], weight.shape[1]
    y_TD = torch.empty(num_tokens, width, dtype=dtype, device=token_ids_T.device)
    _embedding[(num_tokens, triton.cdiv(width, BLOCK))](
        token_ids_T, weight.weight_OI, y_TD, width, scale, BLOCK=BLOCK, num_warps=4, OVERLAP=OVERLAP, launch_pdl=OVERLAP
    )
    return y_TD
