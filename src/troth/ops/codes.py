"""Numbers as codes of 8 bits with one float32 scale for a row of them: int8, and fp8 (e4m3: 4 bits of exponent, 3 of
mantissa).

Owns how rows are rounded. Refuses to know what they are: keys and values (``layer_kv.py``), weights and activations
(``linear.py``).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = {torch.int8: 127.0, FP8: 448.0}
"""Formats -> the code of a row's largest number. int8 is symmetric: -128 is not used."""
LEAST_SCALE: Final = torch.finfo(torch.float32).tiny
"""A row whose scale would be smaller counts as zeros."""


def to_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round rows to the nearest code: number = code * scale.

    In int8 no number moves by more than half a scale, in fp8 by more than a sixteenth of itself or, near zero, 2^-10
    scales. A row with a number that is not finite gets a scale that is not, and codes of 0: what was wrong stays
    visible.

    Args:
        x: float [..., D].
        dtype: one of ``LARGEST``.

    Returns:
        Codes, ``dtype`` [..., D]; scales, float32 [...].
    """
    x = x.float()
    # Divisions by a number are products with its inverse on some devices: here they are on all.
    scale = x.abs().amax(dim=-1) * (1.0 / LARGEST[dtype])
    usable = scale.isfinite() & (scale >= LEAST_SCALE)
    codes = x * (1.0 / scale.where(usable, torch.ones_like(scale))).unsqueeze(-1)
    codes = codes.where(usable.unsqueeze(-1), torch.zeros_like(codes))
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scale


def as_bytes(codes: Tensor) -> Tensor:
    """The same memory in a dtype that PyTorch moves by index on every device, which fp8 is not; others as they are."""
    return codes.view(torch.uint8) if codes.dtype == FP8 else codes
