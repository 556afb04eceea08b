"""A gate by a sigmoid: what Qwen3.5 does to the outputs of its attention. Legend: T tokens, I width."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op

_SHAPES: Final = ((1, 1), (1, 33), (7, 96), (3, 1536))
"""Tokens, width."""
_TIMED_SHAPES: Final = ((1, 4096), (8, 4096), (256, 4096))


def _grid() -> Iterator[Case]:
    for shape in (*_SHAPES, *_TIMED_SHAPES):
        yield Case(sizes(*shape), partial(_arguments, shape), timed=shape in _TIMED_SHAPES)


@op(
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-5, "another exp"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "one rounding of the output to 8 bits of mantissa"),
        torch.float16: Tolerance(1e-3, 2e-3, "one rounding of the output to 11 bits of mantissa"),
    },
    grid=_grid,
)
def sigmoid_gate(x_TI: Tensor, gate_TI: Tensor) -> Tensor:
    """x * sigmoid(gate).

    Args:
        x_TI: float [T, I].
        gate_TI: float [T, I], dtype of x.

    Returns:
        float [T, I], dtype of x; computed in float32, rounded once.
    """
    return (x_TI.float() * gate_TI.float().sigmoid()).to(x_TI.dtype)


def _arguments(shape: tuple[int, int], inputs: Inputs) -> tuple[Any, ...]:
    # Three times as wide as normal: gates that are shut and gates that are open.
    return inputs.normal(*shape), 3 * inputs.normal(*shape)
