"""RMSNorm of a head, then a SiLU gate: what Mamba-2 and Gated DeltaNet do to the outputs of their recurrences.

Legend: T tokens, H heads, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op
from troth.ops.rms_norm import rms_norm

_SHAPES: Final = ((1, 1, 16), (3, 5, 24), (2, 8, 128))
"""Tokens, heads, head size."""
_TIMED_SHAPES: Final = ((1, 32, 128), (8, 32, 128), (256, 32, 128))


def _grid() -> Iterator[Case]:
    for shape in (*_SHAPES, *_TIMED_SHAPES):
        yield Case(sizes(*shape), partial(_arguments, shape), timed=shape in _TIMED_SHAPES)


@op(
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5, "a float32 mean of E squares in another order, another exp"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "one rounding of the output to 8 bits of mantissa"),
        torch.float16: Tolerance(1e-3, 2e-3, "one rounding of the output to 11 bits of mantissa"),
    },
    grid=_grid,
)
def gated_rms_norm(x_THE: Tensor, gate_THE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension.

    Args:
        x_THE: float [T, H, E].
        gate_THE: float [T, H, E]; tokens may be strided.
        weight_E: float32 [E], the multiplier itself.
        eps: added to the mean square.

    Returns:
        float [T, H, E], dtype of x; computed in float32, rounded once.
    """
    return (rms_norm.reference(x_THE.float(), weight_E, eps) * F.silu(gate_THE.float())).to(x_THE.dtype)


def _arguments(shape: tuple[int, int, int], inputs: Inputs) -> tuple[Any, ...]:
    num_tokens, num_heads, width = shape
    # The gate arrives as a slice of a wider product.
    gate_THE = inputs.normal(num_tokens, num_heads * width + 6)[:, 6:].unflatten(-1, (num_heads, width))
    weight_E = inputs.normal(width, dtype=torch.float32) + 1
    return inputs.normal(*shape), gate_THE, weight_E, 1e-6
