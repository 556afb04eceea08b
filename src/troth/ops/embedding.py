"""Rows of the embedding table. Legend: T tokens, V vocabulary, D width."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from troth.ops.grid import Case, Inputs
from troth.ops.linear import FORMS, RawLinearWeight, dense, random_weight
from troth.ops.registry import Tolerance, op
from troth.weights.quantized import QuantTensor


def _grid() -> Iterator[Case]:
    for form, scale in product(FORMS, (1.0, 2.5)):
        yield Case(f"{form}-scale-{scale:g}", partial(_arguments, form, (29, 256), 5, scale))
    for form, num_tokens in product(("BF16", "Q8_0", "Q4_K"), (1, 256)):
        yield Case(f"{form}-{num_tokens}", partial(_arguments, form, (8192, 2560), num_tokens, 1.0), timed=True)


@op(
    tolerances={
        torch.float32: Tolerance(0.0, 0.0, "a copy"),
        torch.bfloat16: Tolerance(0.0, 0.0, "a copy"),
        torch.float16: Tolerance(0.0, 0.0, "a copy"),
    },
    grid=_grid,
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
        held = table.dtype if isinstance(table, Tensor) else torch.float32
        rows_TD = dense(table, held, token_ids_T.device)[token_ids_T].to(dtype)
    return rows_TD if scale == 1.0 else rows_TD.mul_(scale)


def _arguments(form: str, shape: tuple[int, int], num_tokens: int, scale: float, inputs: Inputs) -> tuple[Any, ...]:
    weight = RawLinearWeight((random_weight(inputs, form, shape),))
    return inputs.integers(shape[0], num_tokens), weight, inputs.dtype, scale
