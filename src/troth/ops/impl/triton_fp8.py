"""Weights that were rounded to fp8 at load, and the rounding of what meets them.

A weight's row and a token's inputs are codes with a scale each; products are of codes, and scales multiply what comes
out. Next: ``triton_linear.py``, which decides who multiplies.
Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.codes import FP8, to_codes
from troth.ops.impl.triton import INTERPRETED, power_of_2, warps
from troth.ops.impl.triton_codes import to_codes as codes_of
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.linear import RawWeight, dense
from troth.weights.fp8 import Fp8Tensor

ROUGH: Final = (torch.bfloat16, torch.float16)
"""Dtypes of activations in which nobody sees that the matrix units add up codes with some 14 bits."""
MULTIPLE: Final = 16
"""Of inputs and outputs, for PyTorch's product of codes; its result is bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8LinearWeight:
    """value = code * scale of its row."""

    codes_OI: Tensor
    """float8_e4m3fn [O, I]."""
    scale_O: Tensor
    """float32."""

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.codes_OI.shape[0], self.codes_OI.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.codes_OI.nbytes + self.scale_O.nbytes


def pack_fp8(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> Fp8LinearWeight | None:
    """Weights that are all to be rounded, rounded on their device; None: they are not, or not here."""
    rounded_parts = [part for part in parts if isinstance(part, Fp8Tensor)]
    if (device.type == "cuda") == INTERPRETED or dtype not in ROUGH or len(rounded_parts) != len(parts):
        return None
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    codes_OI = torch.empty(outputs, inputs, dtype=FP8, device=device)
    scale_O = torch.empty(outputs, dtype=torch.float32, device=device)
    first = 0
    for part in rounded_parts:
        end = first + part.shape[0]
        codes_OI[first:end], scale_O[first:end] = to_codes(dense(part.stored, part.stored.dtype, device), FP8)
        first = end
    return Fp8LinearWeight(codes_OI, scale_O)


@triton.jit
def _round_rows(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    i = tl.arange(0, BLOCK)
    inside = (i < width)[None, :]
    numbers = tl.load(x + token[:, None] * stride + i[None, :], mask=inside, other=0.0).to(tl.float32)
    row, scale = codes_of(numbers, codes.dtype.element_ty)
    tl.store(codes + token[:, None] * width + i[None, :], row, mask=inside)
    tl.store(scales + token, scale)


def rounded(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, float8_e4m3fn [T, I], and scales, float32 [T], of each token; as ``ops.codes.to_codes``."""
    num_tokens, width = x_TI.shape
    codes_TI = torch.empty(num_tokens, width, dtype=FP8, device=x_TI.device)
    scale_T = torch.empty(num_tokens, dtype=torch.float32, device=x_TI.device)
    block = power_of_2(width)
    _round_rows[(num_tokens,)](
        x_TI,
        codes_TI,
        scale_T,
        x_TI.stride(0),
        width,
        BLOCK=block,
        num_warps=warps(block),
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
    )
    return codes_TI, scale_T


def multiplies_codes(x_TI: Tensor, weight: Fp8LinearWeight) -> bool:
    """Whether PyTorch multiplies such codes."""
    return x_TI.is_cuda and x_TI.dtype == torch.bfloat16 and not any(size % MULTIPLE for size in weight.shape)
