"""What the Triton kernels of the gated delta rule share: unit vectors, decays, and drafts that a state takes in.

Legend: as ``ops/gated_delta.py``; BD is D or the next power of 2, TILE values of each row of a state.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit(x: tl.tensor) -> tl.tensor:
    """float32 [BD] of length 1."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=0) + 1e-6))


@triton.jit
def unit_rows(x: tl.tensor) -> tl.tensor:
    """float32 [C, BD], rows of length 1."""
    return x * (1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) + 1e-6))[:, None]


@triton.jit
def log_decay(x: tl.tensor, rate: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """As Decay.logs, float32."""
    x += bias
    # log1p(e^x) as max(x, 0) + log(1 + e^-|x|): of 1 + z, z near 0, the logarithm is exact enough when z is added back.
    z = tl.exp(-tl.abs(x))
    y = 1.0 + z
    log1p = tl.where(y == 1.0, z, tl.log(y) * z / tl.where(y == 1.0, 1.0, y - 1.0))
    return -rate * (tl.maximum(x, 0.0) + log1p)


@triton.jit
def recalled(
    state: tl.tensor,
    trail: tl.tensor,
    count: tl.tensor,
    key_head: tl.tensor,
    head: tl.tensor,
    d: tl.tensor,
    e: tl.tensor,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
) -> tl.tensor:
    """A state, float32 [BD, TILE], with the first ``count`` drafts of a row's trail."""
    for _ in range(count):
        k = tl.load(trail + key_head * D + d, mask=d < D, other=0.0)
        u = tl.load(trail + G * D + head * E + e, mask=e < E, other=0.0)
        decay = tl.load(trail + G * D + H * E + head)
        state = tl.fma(k[:, None], u[None, :], state * decay)
        trail += G * D + H * E + H
    return state
