"""A short causal convolution over each channel, with SiLU or plain, for rows of any length (Gu and Dao 2023, Mamba).

Legend: T tokens, C channels, K taps, J = K - 1 remembered inputs, N rows of the persistent batch, L drafts of a trail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.grid import (
    DRAFT_STEPS,
    SINGLE_STEPS,
    TIMED_STATE_STEPS,
    Case,
    DraftStep,
    Inputs,
    RowSpec,
    StateStep,
    sizes,
)
from troth.ops.registry import Tolerance, op
from troth.ops.rows import Rows

_STEPS: Final[dict[str, Sequence[RowSpec]]] = {
    **SINGLE_STEPS,
    "prompt": [(1, 0, 9)],
    "shorter-than-the-taps": [(1, 0, 2), (0, 5, 2)],
    "mixed": [(4, 2, 1), (1, 0, 1), (0, 0, 17), (3, 1, 5)],
}
_PLAIN_STEPS: Final[dict[str, StateStep]] = {"mixed": _STEPS["mixed"], **DRAFT_STEPS}
_TIMED_SIZES: Final = (4, 8192)
"""Taps, channels."""


def _grid() -> Iterator[Case]:
    for (step, specs), taps, channels in product(_STEPS.items(), (2, 3, 4), (1, 33, 128)):
        yield Case(f"{step}-{sizes(taps, channels)}", partial(_arguments, specs, taps, channels))
    for (step, drafts), taps in product(DRAFT_STEPS.items(), (2, 4)):
        yield Case(f"{step}-{sizes(taps, 33)}", partial(_arguments, drafts, taps, 33))
    for step, plain in _PLAIN_STEPS.items():
        yield Case(f"{step}-{sizes(3, 33)}-plain", partial(_arguments, plain, 3, 33, silu=False))
    for step, timed in TIMED_STATE_STEPS.items():
        yield Case(f"{step}-{sizes(*_TIMED_SIZES)}", partial(_arguments, timed, *_TIMED_SIZES), timed=True)


@op(
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5, "a sum of K float32 products in another order, another exp"),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2, "one rounding of the output to 8 bits of mantissa"),
        torch.float16: Tolerance(1e-3, 2e-3, "one rounding of the output to 11 bits of mantissa"),
    },
    grid=_grid,
)
def short_conv(
    x_TC: Tensor, weight_KC: Tensor, state_NJC: Tensor, trail_NLC: Tensor, rows: Rows, silu: bool = True
) -> Tensor:
    """silu(sum over k of weight[k] * x[t - (K - 1) + k]), per row and channel.

    Args:
        x_TC: float [T, C]; the last dimension is contiguous, tokens may be strided.
        weight_KC: float32 [K, C], oldest tap first.
        state_NJC: float32 [N, J, C]: the last J inputs of each row, oldest first. Read where the row has computed
            tokens; a row that starts at 0 has zeros before it, whatever its state holds. Overwritten in place,
            with the inputs before any draft.
        trail_NLC: float32 [N, L, C]: the inputs of the drafts of each row's last step. Read where a row recalls,
            overwritten where one verifies.
        rows: which tokens belong to which row.
        silu: False: the sum itself, as in LFM2, which gates it outside.

    Returns:
        float [T, C], dtype of x; accumulated in float32, rounded once.
    """
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    taps = weight_KC.shape[0]
    begin = 0
    for r in range(rows.num_rows):
        count, state_JC = rows.num_new[r], state_NJC[rows.rows[r]]
        trail_LC = trail_NLC[rows.rows[r]]
        recall(state_JC, trail_LC[: rows.recalls.get(r, 0)])
        before_JC = state_JC if rows.starts[r] > 0 else torch.zeros_like(state_JC)
        seen = torch.cat((before_JC, x_TC[begin : begin + count].float()))
        for t in range(count):
            total_C = (seen[t : t + taps] * weight_KC).sum(dim=0)
            out_TC[begin + t] = (F.silu(total_C) if silu else total_C).to(x_TC.dtype)
        num_drafts = count - 1 if r in rows.verifying else 0
        num_fed = count - num_drafts
        trail_LC[:num_drafts] = x_TC[begin + num_fed : begin + count]
        state_JC.copy_(seen[num_fed : taps - 1 + num_fed])
        begin += count
    return out_TC


def recall(state_JC: Tensor, trail_AC: Tensor) -> None:
    """Take the inputs of A right drafts into a row's state, in place."""
    if len(trail_AC):
        state_JC.copy_(torch.cat((state_JC, trail_AC))[-len(state_JC) :])


def _arguments(step: StateStep, taps: int, channels: int, inputs: Inputs, silu: bool = True) -> tuple[Any, ...]:
    drafts = step if isinstance(step, DraftStep) else DraftStep(step)
    specs, rows = drafts.specs, drafts.rows(inputs.device)
    # The input arrives as a slice of a wider product.
    x_TC = inputs.normal(sum(rows.num_new), channels + 3)[:, :channels]
    weight_KC = inputs.normal(taps, channels, dtype=torch.float32)
    state_NJC = inputs.state(specs, (taps - 1, channels))
    return x_TC, weight_KC, state_NJC, inputs.trail(specs, drafts.recalls, (channels,)), rows, silu
