"""Matrix products with a model's weights, whatever form they are held in.

Legend: T tokens, I inputs, O outputs.

Weights come from the artifact as rows of numbers (``Tensor``) or of quantised blocks (``QuantTensor``). ``pack`` asks
the active providers, in order, to turn one or more of them, stacked along O, into the form they compute with; that
happens once, at load. What nobody packs stays as it is and runs through the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from troth.ops.registry import Tolerance, op
from troth.weights.quantized import QuantTensor

RawWeight = Tensor | QuantTensor


class LinearWeight(Protocol):
    """A weight in the form one provider computes with."""

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""

    @property
    def num_bytes(self) -> int:
        """Bytes it occupies in memory."""


@dataclass(frozen=True, slots=True)
class RawLinearWeight:
    """Weights as the artifact holds them, stacked along O."""

    parts: tuple[RawWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, and in memory as far as they were read."""
        return sum(raw_bytes(part) for part in self.parts)


Packer = Callable[[Sequence[RawWeight], torch.dtype, torch.device], LinearWeight | None]
PACKERS: Final[dict[str, Packer]] = {}
"""Provider name -> packer; None from a packer means: not this weight."""


@op(
    tolerances={
        torch.float32: Tolerance(1e-4, 1e-4, "sums of a few thousand float32 products in another order"),
        torch.bfloat16: Tolerance(3e-2, 2e-2, "weights and output rounded to 8 bits of mantissa"),
        torch.float16: Tolerance(4e-3, 4e-3, "weights and output rounded to 11 bits of mantissa"),
    }
)
def linear(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> Tensor:
    """x @ weight^T + bias.

    Args:
        x_TI: float [T, I].
        weight: a LinearWeight of shape (O, I). The reference knows RawLinearWeight.
        bias_O: float [O] of the dtype of x, or None.
        num_exact: tokens at the head that must be exact in float32 where a provider has a faster way for the rest
            (``Rows.num_exact``); None: all of them.

    Returns:
        float [T, O], dtype of x; accumulated in float32, rounded once.
    """
    products = [x_TI.float() @ dense(part, torch.float32, x_TI.device).T for part in weight.parts]
    y_TO = torch.cat(products, dim=-1)
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(x_TI.dtype)


def pack(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> LinearWeight:
    """Stack weights along O and hand them to the first active provider that wants them.

    Args:
        parts: (O_i, I) each, the same I.
        dtype: of the activations they will meet.
        device: where they will be used.
    """
    for provider in linear.active:
        packed = PACKERS[provider](parts, dtype, device) if provider in PACKERS else None
        if packed is not None:
            return packed
    return RawLinearWeight(tuple(parts))


def dense(part: RawWeight, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One weight as an ordinary tensor [O, I]."""
    if isinstance(part, QuantTensor):
        return part.dequantize(dtype).to(device)
    return part.to(device=device, dtype=dtype)


def raw_bytes(part: RawWeight) -> int:
    """Bytes of one weight in the form the artifact holds it."""
    return part.num_bytes if isinstance(part, QuantTensor) else part.numel() * part.element_size()
