"""Elementary functions the way the kernels need them: exact near the ends where the approximate ones are not."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Of float32, to 1e-7 absolute."""
    e = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Of float32."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def log(x: tl.tensor) -> tl.tensor:
    """Of normal positive float32, to 2 units in the last place everywhere; the hardware's is off by 2^-22 near 1.

    x = 2^e m with m in [sqrt(1/2), sqrt(2)); log m is the series of 2 atanh((m - 1) / (m + 1)), up to the 9th power.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(mantissa - 1.0, mantissa + 1.0)
    z = s * s
    series = z * (0.33333334 + z * (0.2 + z * (0.14285715 + z * 0.11111111)))
    return exponent.to(tl.float32) * 0.6931472 + (2.0 * s + 2.0 * s * series)
