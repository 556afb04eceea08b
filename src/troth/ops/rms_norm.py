"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone and with the residual sum before it.

Legend: T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op

_TOLERANCES: Final = {
    torch.float32: Tolerance(1e-5, 1e-5, "a float32 mean of D squares in another order"),
    torch.bfloat16: Tolerance(1e-2, 1.6e-2, "one rounding of the output to 8 bits of mantissa"),
    torch.float16: Tolerance(1e-3, 2e-3, "one rounding of the output to 11 bits of mantissa"),
}
_SHAPES: Final = ((1, 1), (1, 32), (3, 65), (5, 576), (2, 2560))
"""Tokens, width."""
_TIMED_SHAPES: Final = ((1, 2560), (8, 2560), (256, 2560))


def _grid(num_inputs: int) -> Iterator[Case]:
    for shape in (*_SHAPES, *_TIMED_SHAPES):
        yield Case(sizes(*shape), partial(_arguments, shape, num_inputs), timed=shape in _TIMED_SHAPES)


@op(tolerances=_TOLERANCES, grid=partial(_grid, 1))
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x_TD: float [..., D].
        weight_D: float32 [D], the multiplier itself (families that store weight - 1 add the one at load).
        eps: added to the mean square.

    Returns:
        As x, same dtype; computed in float32, rounded once.
    """
    x = x_TD.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D).to(x_TD.dtype)


@op(tolerances=_TOLERANCES, grid=partial(_grid, 2))
def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, and its rms_norm.

    Args:
        x_TD: float [T, D].
        residual_TD: float [T, D], same dtype.
        weight_D: float32 [D], as for ``rms_norm``.
        eps: added to the mean square.

    Returns:
        (normalised, sum), both as x. ``x`` and ``residual`` may be overwritten by a provider and must not be used
        again.
    """
    total_TD = x_TD + residual_TD
    return rms_norm.reference(total_TD, weight_D, eps), total_TD


def _arguments(shape: tuple[int, int], num_inputs: int, inputs: Inputs) -> tuple[Any, ...]:
    x = [3 * inputs.normal(*shape) for _ in range(num_inputs)]
    return *x, inputs.normal(shape[1], dtype=torch.float32) + 1, 1e-6
