"""Rows as codes of 8 bits with a scale each, in kernels: the rounding of ``ops/codes.py``, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_codes(x: tl.tensor, kind: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """float32 [T, D] as codes of kind, int8 or fp8, [T, D], and their scales, float32 [T]."""
    LARGEST: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1)
    scale = largest * (1.0 / LARGEST)
    usable = (scale >= 1.1754943508222875e-38) & (scale < float("inf"))
    steps = tl.div_rn(1.0, tl.where(usable, scale, 1.0))
    codes = tl.where(usable[:, None], x * steps[:, None], 0.0)
    if kind == tl.int8:
        # Beside 2^23 and a half of it float32 holds whole numbers only.
        codes = (codes + 12582912.0) - 12582912.0
    return codes.to(kind), scale
