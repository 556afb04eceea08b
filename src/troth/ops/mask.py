"""Takes away the logits of tokens that may not come, on the few rows that a grammar binds.

Legend: R rows, V vocabulary, G rows with a mask, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op

_SIZES: Final = ((1, 5, 1), (3, 64, 2), (4, 97, 4))
"""Rows, vocabulary, rows with a mask."""
_TIMED_SIZES: Final = ((1, 151936, 1), (16, 49152, 16))


def _grid() -> Iterator[Case]:
    for size in (*_SIZES, *_TIMED_SIZES):
        yield Case(sizes(*size), partial(_arguments, *size), timed=size in _TIMED_SIZES)


@op(tolerances={torch.float32: Tolerance(0.0, 0.0, "a logit stays or goes")}, grid=_grid)
def mask(logits_RV: Tensor, row_G: Tensor, allowed_GW: Tensor) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    Args:
        logits_RV: float32 [R, V].
        row_G: int64 [G], which rows; each at most once.
        allowed_GW: int32 [G, ceil(V / 32)]: bit i % 32 of word i // 32 is set where token i may come.
    """
    bit_32 = torch.arange(32, device=allowed_GW.device)
    forbidden_GV = ((allowed_GW[:, :, None] >> bit_32) & 1 == 0).flatten(1)[:, : logits_RV.shape[1]]
    logits_RV[row_G] = logits_RV[row_G].masked_fill(forbidden_GV, -torch.inf)


def _arguments(num_rows: int, vocab_size: int, num_masks: int, inputs: Inputs) -> tuple[Any, ...]:
    row_G = torch.tensor(inputs.order(num_rows)[:num_masks], device=inputs.device)
    words = inputs.integers(2**32, num_masks, -(-vocab_size // 32)) - 2**31
    return inputs.normal(num_rows, vocab_size, dtype=torch.float32), row_G, words.int()
