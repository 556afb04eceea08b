"""Rows of the embedding table. Legend: T tokens, V vocabulary, D width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from troth.ops.linear import dense
from troth.ops.registry import Tolerance, op
from troth.weights.quantized import QuantTensor


@op(
    tolerances={
        torch.float32: Tolerance(0.0, 0.0, "a copy"),
        torch.bfloat16: Tolerance(0.0, 0.0, "a copy"),
        torch.float16: Tolerance(0.0, 0.0, "a copy"),
    }
)
def embedding(token_ids_T: Tensor, weight: Any, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """weight[token_ids] * scale.

    Args:
        token_ids_T: int64 [T].
        weight: a LinearWeight of shape (V, D). The reference knows RawLinearWeight of one part.
        dtype: of the result.
        scale: multiplies the rows after they were rounded to ``dtype`` (Gemma).

    Returns:
        float [T, D].
    """
    (table,) = weight.parts
    if isinstance(table, QuantTensor):
        rows_TD = table.rows(token_ids_T.cpu()).to(device=token_ids_T.device, dtype=dtype)
    else:
        rows_TD = dense(table, table.dtype, token_ids_T.device)[token_ids_T].to(dtype)
    return rows_TD if scale == 1.0 else rows_TD.mul_(scale)
