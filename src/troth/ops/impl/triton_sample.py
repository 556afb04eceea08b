"""The end of a step by Triton kernels: whether logits are finite, and which token each row draws.

Rows are split into runs of tokens, one program each; a second kernel takes the best of a row's runs. Parameters of a
draw are read on the device, so that one captured step serves greedy and random rows alike.
Legend: R rows, V vocabulary, P runs of a row.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.all_finite import all_finite
from troth.ops.impl.triton import power_of_2, takes
from troth.ops.impl.triton_elementary import log
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.impl.triton_sample_filter import Kept, filtered, is_kept, mix, uniform
from troth.ops.sample import Draws, sample

RUN: Final = 4096
"""Tokens per program: 38 programs for a vocabulary of 152k."""
CLOSE: Final = 1e-3
"""Far beyond the error of the quick noise: tokens this near the best are compared exactly."""


@triton.jit
def _hashed(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """uint64 of each token id under a key, as in ops/sample.py."""
    id_bits = (token + 1).to(tl.int64).to(tl.uint64, bitcast=True)
    return mix(id_bits * 0xD1342543DE82EF95 + key.to(tl.uint64, bitcast=True))


@triton.jit
def _gumbel(hashed: tl.tensor) -> tl.tensor:
    """As ops.sample.gumbel_noise: float32."""
    u = tl.minimum(uniform(hashed, 0.5).to(tl.float32), 0.99999994)
    # log1p(-u): the logarithm of 1 - u as rounded, and what rounding took from it.
    w = 1.0 - u
    return -log(-(log(w) - tl.div_rn((w - 1.0) + u, w)))


@triton.jit
def _gumbel_nearly(hashed: tl.tensor) -> tl.tensor:
    """The same to 1e-4, in a third of the time: without float64 and exact logarithms."""
    u = ((hashed >> 11).to(tl.int64, bitcast=True).to(tl.float32) + 0.5) * 1.1102230246251565e-16
    u = tl.minimum(u, 0.99999994)
    series = u * (1.0 + u * (0.5 + u * 0.33333334))
    return -tl.log(tl.where(u < 0.0078125, series, -tl.log(1.0 - u)))


@triton.jit
def _best_of_runs(
    logits: tl.tensor,
    temperature: tl.tensor,
    keys: tl.tensor,
    kept: tl.tensor,
    best_score: tl.tensor,
    best_token: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    RUN: tl.constexpr,
    FILTERS: tl.constexpr,
    CLOSE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row, run = tl.program_id(0), tl.program_id(1)
    token = run * RUN + tl.arange(0, RUN)
    inside = token < vocab
    at = logits + row.to(tl.int64) * stride
    score = tl.load(at + token, mask=inside, other=float("-inf")).to(tl.float32)
    t = tl.load(temperature + row)
    if t > 0.0:
        key = tl.load(keys + row)
        score = tl.div_rn(score, t)
        if FILTERS:
            score = tl.where(is_kept(kept, row, score, token), score, float("-inf"))
        score = tl.where(inside, score, float("-inf"))
        hashed = _hashed(key, token)
        nearly = score + _gumbel_nearly(hashed)
        best, index = tl.max(nearly, axis=0, return_indices=True, return_indices_tie_break_left=True)
        if tl.sum((nearly >= best - CLOSE).to(tl.int32), axis=0) == 1:
            # Nothing else comes near: only its exact score is left to be known.
            winner = tl.minimum(run * RUN + index, vocab - 1)
            best = tl.div_rn(tl.load(at + winner).to(tl.float32), t) + _gumbel(_hashed(key, winner))
        else:
            exact = score + _gumbel(hashed)
            best, index = tl.max(exact, axis=0, return_indices=True, return_indices_tie_break_left=True)
    else:
        best, index = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + run
    tl.store(best_score + out, best)
    tl.store(best_token + out, tl.minimum(run * RUN + index, vocab - 1))


@triton.jit
def _best_of_row(
    best_score: tl.tensor,
    best_token: tl.tensor,
    tokens: tl.tensor,
    runs: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row = tl.program_id(0)
    p = tl.arange(0, BLOCK)
    score = tl.load(best_score + row * runs + p, mask=p < runs, other=float("-inf"))
    _, index = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best_token + row * runs + tl.minimum(index, runs - 1))
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _finite_runs(
    logits: tl.tensor,
    finite: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    RUN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row, run = tl.program_id(0), tl.program_id(1)
    token = run * RUN + tl.arange(0, RUN)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocab, other=0.0).to(tl.float32)
    # False for NaN too.
    is_finite = (tl.abs(x) < float("inf")).to(tl.int32)
    tl.store(finite + row * tl.num_programs(1) + run, tl.min(is_finite, axis=0))


@triton.jit
def _finite_rows(
    finite: tl.tensor,
    y: tl.tensor,
    runs: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row = tl.program_id(0)
    p = tl.arange(0, BLOCK)
    is_finite = tl.load(finite + row * runs + p, mask=p < runs, other=1)
    tl.store(y + row, tl.min(is_finite, axis=0).to(tl.int1))


def _takes_logits(logits_RV: Tensor, *_: object) -> bool:
    return takes(logits_RV) and logits_RV.stride(-1) == 1


@sample.provider("triton", supports=_takes_logits)
def sample_triton(logits_RV: Tensor, draws: Draws) -> Tensor:
    """As ops.sample; logits may be of any float type, and only those above the vocabulary's end are read."""
    num_rows, vocab_size = logits_RV.shape
    runs = triton.cdiv(vocab_size, RUN)
    device = logits_RV.device
    score_RP = torch.empty(num_rows, runs, dtype=torch.float32, device=device)
    token_RP = torch.empty(num_rows, runs, dtype=torch.int32, device=device)
    token_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    # A greedy step has no filters: what they would keep is never read.
    kept: Kept = draws.temperature_R if draws.all_greedy else filtered(logits_RV, draws)
    _best_of_runs[(num_rows, runs)](
        logits_RV,
        draws.temperature_R,
        draws.key_R,
        kept,
        score_RP,
        token_RP,
        logits_RV.stride(0),
        vocab_size,
        RUN=RUN,
        FILTERS=not draws.all_greedy,
        CLOSE=CLOSE,
        num_warps=8,
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
    )
    _best_of_row[(num_rows,)](
        score_RP, token_RP, token_R, runs, BLOCK=power_of_2(runs), num_warps=1, OVERLAP=OVERLAP, launch_pdl=OVERLAP
    )
    return token_R


@all_finite.provider("triton", supports=_takes_logits)
def all_finite_triton(logits_RV: Tensor) -> Tensor:
    """As ops.all_finite."""
    num_rows, vocab_size = logits_RV.shape
    runs = triton.cdiv(vocab_size, RUN)
    finite_RP = torch.empty(num_rows, runs, dtype=torch.int32, device=logits_RV.device)
    finite_R = torch.empty(num_rows, dtype=torch.bool, device=logits_RV.device)
    _finite_runs[(num_rows, runs)](
        logits_RV, finite_RP, logits_RV.stride(0), vocab_size, RUN=RUN, num_warps=8, OVERLAP=OVERLAP, launch_pdl=OVERLAP
    )
    _finite_rows[(num_rows,)](
        finite_RP, finite_R, runs, BLOCK=power_of_2(runs), num_warps=1, OVERLAP=OVERLAP, launch_pdl=OVERLAP
    )
    return finite_R
