"""The gate of a gated MLP: act(gate) * up (Shazeer 2020). Legend: T tokens, I intermediate width."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op

Activation = Literal["silu", "gelu_tanh"]

_SHAPES: Final = ((1, 1), (1, 33), (7, 96), (3, 1536))
"""Tokens, intermediate width."""
_TIMED_SHAPES: Final = ((1, 9728), (8, 9728), (256, 9728))


def _grid() -> Iterator[Case]:
    for activation in get_args(Activation):
        for shape in (*_SHAPES, *_TIMED_SHAPES):
            name = f"{activation}-{sizes(*shape)}"
            yield Case(name, partial(_arguments, shape, activation), timed=shape in _TIMED_SHAPES)


@op(
    tolerances={
        torch.float32: Tolerance(1e-6, 1e-5, "another exp or tanh implementation"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "one rounding of the output to 8 bits of mantissa"),
        torch.float16: Tolerance(1e-3, 2e-3, "one rounding of the output to 11 bits of mantissa"),
    },
    grid=_grid,
)
def gated_activation(gate_up_T2I: Tensor, activation: Activation) -> Tensor:
    """act(first half) * second half.

    Args:
        gate_up_T2I: float [T, 2 I], gate values then up values.
        activation: silu, or gelu in its tanh form.

    Returns:
        float [T, I], same dtype; computed in float32, rounded once.
    """
    gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
    gated_TI = F.silu(gate_TI) if activation == "silu" else F.gelu(gate_TI, approximate="tanh")
    return (gated_TI * up_TI).to(gate_up_T2I.dtype)


def _arguments(shape: tuple[int, int], activation: Activation, inputs: Inputs) -> tuple[Any, ...]:
    # Three times as wide as normal: both ends of the activation, where it is 0 and where it is its input.
    return 3 * inputs.normal(shape[0], 2 * shape[1]), activation
