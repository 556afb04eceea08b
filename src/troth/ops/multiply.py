"""A gate without an activation: what LFM2 does before and behind its convolutions. Legend: T tokens, I width."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op

_SHAPES: Final = ((1, 1), (1, 33), (7, 96))
"""Tokens, width."""
_TIMED_SHAPES: Final = ((1, 2048), (8, 2048), (256, 2048))


def _grid() -> Iterator[Case]:
    for shape in (*_SHAPES, *_TIMED_SHAPES):
        yield Case(sizes(*shape), partial(_arguments, shape), timed=shape in _TIMED_SHAPES)


@op(
    tolerances={
        torch.float32: Tolerance(0.0, 0.0, "one rounding, the same one"),
        torch.bfloat16: Tolerance(0.0, 0.0, "one rounding, the same one"),
        torch.float16: Tolerance(0.0, 0.0, "one rounding, the same one"),
    },
    grid=_grid,
)
def multiply(x_TI: Tensor, gate_TI: Tensor) -> Tensor:
    """x * gate.

    Args:
        x_TI: float [T, I]; the last dimension is contiguous, tokens may be strided.
        gate_TI: float [T, I], dtype of x, as x.

    Returns:
        float [T, I], dtype of x; rounded once.
    """
    return (x_TI.float() * gate_TI.float()).to(x_TI.dtype)


def _arguments(shape: tuple[int, int], inputs: Inputs) -> tuple[Any, ...]:
    # Both arrive as slices of one wider product.
    num_tokens, width = shape
    both = inputs.normal(num_tokens, 2 * width + 1)
    return both[:, :width], both[:, width : 2 * width]
