"""From logits to tokens: penalties, filters and the keyed draw (semantics D).

Legend: R rows, V vocabulary.

The token at step s of a request is argmax over the filtered vocabulary of logit / T + gumbel(seed, s, id). The noise
is a pure function of (seed, step, token id), so a draw does not depend on batch neighbours, preemption or rejected
drafts, and a draft that used the same noise is accepted exactly when it equals the target's own draw.

Noise: key = seed XOR (step + 1) * 0x9e3779b97f4a7c15 (mod 2^64); h = mix(key + (id + 1) * 0xd1342543de82ef95), mix
being splitmix64's finaliser (Steele, Lea, Flood 2014); u = top 53 bits of h as a fraction in (0, 1); gumbel =
-log(-log1p(-u)). Small u keeps its relative precision in float32, so the far tail, where the winners come from, is
exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op

GOLDEN: Final = 0x9E3779B97F4A7C15
TOKEN_STRIDE: Final = 0xD1342543DE82EF95
_MASK: Final = (1 << 64) - 1
_XTC_ID: Final = -1
"""Stands for a token id in the draw that decides whether XTC applies at a step."""


@dataclass(slots=True)
class Draws:
    """How to draw each row; tensors on the device of the logits."""

    temperature_R: Tensor
    """float32; 0 is greedy."""
    top_k_R: Tensor
    """int32; 0 is off."""
    top_p_R: Tensor
    """float32; 1 is off."""
    min_p_R: Tensor
    """float32; 0 is off."""
    xtc_probability_R: Tensor
    """float32; 0 is off."""
    xtc_threshold_R: Tensor
    """float32."""
    key_R: Tensor
    """int64, the bits of ``step_key``."""
    all_greedy: bool
    """Known on the host, so that a greedy step needs nothing else."""


def step_key(seed: int, step: int) -> int:
    """The 64-bit key of the draw at one step of one request."""
    return (seed ^ ((step + 1) * GOLDEN & _MASK)) & _MASK


def as_int64(value: int) -> int:
    """The signed integer with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def gumbel_noise(key: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of each token id under one key.

    Args:
        key: 64 bits, signed or unsigned.
        token_ids: int64, any shape.

    Returns:
        float32, shape and device of ``token_ids``.
    """
    hashed = _mix64((token_ids + 1) * as_int64(TOKEN_STRIDE) + as_int64(key & _MASK))
    # 53 bits and a half keep u inside (0, 1); the clamp keeps float32 rounding from reaching 1.
    uniform = (_shift_right(hashed, 11).double() + 0.5).mul_(2.0**-53).float().clamp_(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))


_FILTERS: Final[tuple[dict[str, float], ...]] = (
    {},
    {"temperature": 0.0},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"xtc_probability": 0.5},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "xtc_probability": 1.0},
)
"""What differs from a plain draw, row by row."""


def _grid() -> Iterator[Case]:
    for greedy, shape in ((True, (3, 50)), (True, (3, 5003)), (False, (1, 1)), (False, (7, 50)), (False, (29, 1031))):
        yield Case(f"{'greedy-' * greedy}{sizes(*shape)}", partial(_arguments, shape, greedy))
    for greedy, shape in ((True, (8, 151936)), (False, (1, 151936)), (False, (8, 151936))):
        yield Case(f"{'greedy-' * greedy}{sizes(*shape)}", partial(_arguments, shape, greedy), timed=True)


@op(tolerances={torch.int64: Tolerance(0.0, 0.0, "token ids are equal or wrong")}, grid=_grid)
def sample(logits_RV: Tensor, draws: Draws) -> Tensor:
    """Draw one token per row.

    Args:
        logits_RV: float32 [R, V], finite, penalised, biased and masked already.
        draws: parameters of each row.

    Returns:
        int64 [R]. Greedy rows give the lowest id among equal maxima.
    """
    chosen_R = logits_RV.argmax(dim=-1)
    if draws.all_greedy:
        return chosen_R
    for r, temperature in enumerate(draws.temperature_R.tolist()):
        if temperature > 0.0:
            chosen_R[r] = _draw(logits_RV[r] / temperature, draws, r)
    return chosen_R


def _draw(scaled_V: Tensor, draws: Draws, r: int) -> Tensor:
    key = int(draws.key_R[r])
    top_p, min_p = float(draws.top_p_R[r]), float(draws.min_p_R[r])
    kept, ids = _candidates(scaled_V, int(draws.top_k_R[r]))
    if top_p < 1.0:
        kept, ids = _nucleus(kept, ids, top_p)
    if min_p > 0.0:
        keep = kept.softmax(0) >= min_p * kept.softmax(0).max()
        kept, ids = kept[keep], ids[keep]
    if _uniform(key) < float(draws.xtc_probability_R[r]):
        kept, ids = _exclude_top_choices(kept, ids, float(draws.xtc_threshold_R[r]))
    return ids[(kept + gumbel_noise(key, ids)).argmax()]


def _candidates(scaled_V: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Scores and ids that top-k leaves; ties at the threshold stay."""
    if not 0 < top_k < scaled_V.shape[0]:
        return scaled_V, torch.arange(scaled_V.shape[0], device=scaled_V.device)
    threshold = scaled_V.topk(top_k).values[-1]
    ids = (scaled_V >= threshold).nonzero().squeeze(1)
    return scaled_V[ids], ids


def _nucleus(kept: Tensor, ids: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of most likely tokens whose mass reaches top_p; the token that crosses it stays."""
    probs, order = kept.softmax(0).sort(descending=True, stable=True)
    before = probs.cumsum(0) - probs
    inside = order[before < top_p]
    return kept[inside], ids[inside]


def _exclude_top_choices(kept: Tensor, ids: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """XTC: drop every token as likely as the threshold, but the least likely of them."""
    probs = kept.softmax(0)
    above = probs >= threshold
    if int(above.sum()) < 2:
        return kept, ids
    spared = torch.where(above, probs, torch.inf).argmin()
    above[spared] = False
    return kept[~above], ids[~above]


def _uniform(key: int) -> float:
    """One uniform number in [0, 1) under the key."""
    value = torch.tensor((_XTC_ID + 1) * TOKEN_STRIDE + as_int64(key & _MASK))
    return float(_shift_right(_mix64(value), 11)) * 2.0**-53


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * as_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * as_int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64; torch's >> copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draws_of(rows: Sequence[Mapping[str, float]], keys: Sequence[int], device: torch.device) -> Draws:
    """Draws of rows that say, under the names of SamplingParams, how they differ from a plain draw.

    Args:
        rows: of each row, what is not off.
        keys: ``step_key`` of each row.
        device: where the tensors go.
    """

    def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([row.get(name, off) for row in rows], dtype=dtype, device=device)

    return Draws(
        temperature_R=column("temperature", 1.0),
        top_k_R=column("top_k", 0, torch.int32),
        top_p_R=column("top_p", 1.0),
        min_p_R=column("min_p", 0.0),
        xtc_probability_R=column("xtc_probability", 0.0),
        xtc_threshold_R=column("xtc_threshold", 0.1),
        key_R=torch.tensor([as_int64(key) for key in keys], device=device),
        all_greedy=all(row.get("temperature", 1.0) == 0.0 for row in rows),
    )


def _arguments(shape: tuple[int, int], greedy: bool, inputs: Inputs) -> tuple[Any, ...]:
    rows = [{"temperature": 0.0} if greedy else _FILTERS[r % len(_FILTERS)] for r in range(shape[0])]
    keys = [step_key(r, 3 * r) for r in range(shape[0])]
    return 3 * inputs.normal(*shape, dtype=torch.float32), draws_of(rows, keys, inputs.device)
