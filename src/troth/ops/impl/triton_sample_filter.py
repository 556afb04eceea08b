"""Which tokens the filters of a draw leave, without sorting: a row's set is told by two bounds on its scores.

Top-k, top-p and min-p keep the best tokens down to some score; at that score top-p may keep only the first ids. XTC
takes away the best down to another score and spares one id there. One program per row finds those bounds by bisection:
each pass over the row counts and weighs what lies above three scores. Rows without filters return at once.
Legend: R rows, V vocabulary; scores are logits over temperature.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.sample import Draws

Kept = Tensor
"""int32 [R, 4], for ``is_kept``: the least score (its bits), the last id that stays at that score, the least score of
those that XTC takes away (its bits), the id it spares there."""

TILE: Final = 4096


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """splitmix64's finaliser, of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(hashed: tl.tensor, half: tl.constexpr) -> tl.tensor:
    """The top 53 bits of uint64 as a float64 fraction, plus ``half`` of its last place."""
    return ((hashed >> 11).to(tl.int64, bitcast=True).to(tl.float64) + half) * 1.1102230246251565e-16


@triton.jit
def is_kept(kept: tl.tensor, row: tl.tensor, score: tl.tensor, token: tl.tensor) -> tl.tensor:
    """bool, as ``score``: whether the filters leave these tokens of a row."""
    floor = tl.load(kept + row * 4).to(tl.float32, bitcast=True)
    last = tl.load(kept + row * 4 + 1)
    ceiling = tl.load(kept + row * 4 + 2).to(tl.float32, bitcast=True)
    spared = tl.load(kept + row * 4 + 3)
    above = (score > floor) | ((score == floor) & (token <= last))
    return above & ((score < ceiling) | (token == spared))


@triton.jit
def _scores(logits: tl.tensor, first: tl.tensor, vocab: tl.tensor, t: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    token = first + tl.arange(0, TILE)
    logit = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logit, t), token


@triton.jit
def _range(logits: tl.tensor, vocab: tl.tensor, t: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The largest score, and the least that is not minus infinity."""
    highest = tl.full([TILE], float("-inf"), tl.float32)
    lowest = tl.full([TILE], float("inf"), tl.float32)
    for first in tl.range(0, vocab, TILE):
        score, _token = _scores(logits, first, vocab, t, TILE)
        highest = tl.maximum(highest, score)
        lowest = tl.minimum(lowest, tl.where(score == float("-inf"), float("inf"), score))
    return tl.max(highest, axis=0), tl.min(lowest, axis=0)


@triton.jit
def _above(
    logits: tl.tensor,
    vocab: tl.tensor,
    t: tl.tensor,
    top: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    WEIGHTS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """How many scores are at least a, b and c; if WEIGHTS, also what they weigh: the sums of e^(score - top)."""
    na = tl.zeros([TILE], tl.int32)
    nb = tl.zeros([TILE], tl.int32)
    nc = tl.zeros([TILE], tl.int32)
    wa = tl.zeros([TILE], tl.float32)
    wb = tl.zeros([TILE], tl.float32)
    wc = tl.zeros([TILE], tl.float32)
    for first in tl.range(0, vocab, TILE):
        score, token = _scores(logits, first, vocab, t, TILE)
        inside = token < vocab
        na += ((score >= a) & inside).to(tl.int32)
        nb += ((score >= b) & inside).to(tl.int32)
        nc += ((score >= c) & inside).to(tl.int32)
        if WEIGHTS:
            weight = tl.where(inside, tl.exp(score - top), 0.0)
            wa += tl.where(score >= a, weight, 0.0)
            wb += tl.where(score >= b, weight, 0.0)
            wc += tl.where(score >= c, weight, 0.0)
    na, nb, nc = tl.sum(na, axis=0), tl.sum(nb, axis=0), tl.sum(nc, axis=0)
    wa, wb, wc = tl.sum(wa, axis=0), tl.sum(wb, axis=0), tl.sum(wc, axis=0)
    return na, nb, nc, wa, wb, wc


@triton.jit
def _top_k_floor(
    logits: tl.tensor,
    vocab: tl.tensor,
    t: tl.tensor,
    top: tl.tensor,
    bottom: tl.tensor,
    k: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The k-th largest score, or a lower one that as many reach."""
    at_top, at_bottom, _n3, _w1, _w2, _w3 = _above(logits, vocab, t, top, top, bottom, bottom, False, TILE)
    # Fewer than k tokens can come: all stay.
    low = tl.where(at_bottom >= k, bottom, float("-inf"))
    low = tl.where(at_top >= k, top, low)
    high, num_low = top, at_bottom
    middle = 0.5 * low + 0.5 * high
    while (low < middle) & (middle < high) & (num_low != k):
        first, third = 0.5 * low + 0.5 * middle, 0.5 * middle + 0.5 * high
        n1, n2, n3, _w1, _w2, _w3 = _above(logits, vocab, t, top, first, middle, third, False, TILE)
        high = tl.where(n3 >= k, high, tl.where(n2 >= k, third, tl.where(n1 >= k, middle, first)))
        low = tl.where(n3 >= k, third, tl.where(n2 >= k, middle, tl.where(n1 >= k, first, low)))
        num_low = tl.where(n3 >= k, n3, tl.where(n2 >= k, n2, tl.where(n1 >= k, n1, num_low)))
        middle = 0.5 * low + 0.5 * high
    return low


@triton.jit
def _nucleus(
    logits: tl.tensor,
    vocab: tl.tensor,
    t: tl.tensor,
    top: tl.tensor,
    floor: tl.tensor,
    top_p: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Of tokens of at least ``floor``: the score where their mass, from the best down, reaches top_p, and the last id
    that stays at that score."""
    num_top, num_low, _n3, mass_top, mass, _w3 = _above(logits, vocab, t, top, top, floor, floor, True, TILE)
    wanted = top_p * mass
    # Mass from `low` up reaches what is wanted, mass from `high` up does not.
    low = tl.where(mass_top >= wanted, top, floor)
    high, num_high, mass_high = top, num_top, mass_top
    if mass_top >= wanted:
        num_high, mass_high = num_high * 0, mass_high * 0.0
    middle = 0.5 * low + 0.5 * high
    while (low < middle) & (middle < high) & (num_low - num_high > 1):
        first, third = 0.5 * low + 0.5 * middle, 0.5 * middle + 0.5 * high
        n1, n2, n3, w1, w2, w3 = _above(logits, vocab, t, top, first, middle, third, True, TILE)
        if w3 >= wanted:
            low, num_low = third, n3
        elif w2 >= wanted:
            low, num_low, high, num_high, mass_high = middle, n2, third, n3, w3
        elif w1 >= wanted:
            low, num_low, high, num_high, mass_high = first, n1, middle, n2, w2
        else:
            high, num_high, mass_high = first, n1, w1
        middle = 0.5 * low + 0.5 * high
    # One score is left between the two: the least that reaches `low`.
    least = tl.full([TILE], float("inf"), tl.float32)
    for first in tl.range(0, vocab, TILE):
        score, token = _scores(logits, first, vocab, t, TILE)
        least = tl.minimum(least, tl.where(score >= low, score, float("inf")))
    bound = tl.min(least, axis=0)
    num_stay = tl.ceil((wanted - mass_high) / tl.exp(bound - top))
    num_seen = num_top * 0
    last = vocab
    for first in tl.range(0, vocab, TILE):
        score, token = _scores(logits, first, vocab, t, TILE)
        tie = ((score == bound) & (token < vocab)).to(tl.int32)
        place = num_seen + tl.cumsum(tie, axis=0)
        beyond = (tie > 0) & (place.to(tl.float32) > tl.maximum(num_stay, 1.0))
        last = tl.minimum(last, tl.min(tl.where(beyond, token, vocab), axis=0) - 1)
        num_seen += tl.sum(tie, axis=0)
    return bound, last


@triton.jit
def _filter(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    xtc_probability: tl.tensor,
    xtc_threshold: tl.tensor,
    keys: tl.tensor,
    kept: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    row = tl.program_id(0)
    vocab += row * 0  # a vocabulary of 1 would be a constant, which may not change its type below
    logits += row.to(tl.int64) * stride
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    least_share = tl.load(min_p + row)
    probability = tl.load(xtc_probability + row).to(tl.float64)
    excludes = uniform(mix(tl.load(keys + row).to(tl.uint64, bitcast=True)), 0.0) < probability
    cuts_k = (k > 0) & (k < vocab)
    floor = float("-inf") + t * 0.0
    last = vocab
    ceiling = float("inf") + t * 0.0
    spared = vocab * 0 - 1
    if (t > 0.0) & (cuts_k | (p < 1.0) | (least_share > 0.0) | excludes):
        top, bottom = _range(logits, vocab, t, TILE)
        if cuts_k:
            floor = _top_k_floor(logits, vocab, t, top, bottom, k, TILE)
        if p < 1.0:
            floor, last = _nucleus(logits, vocab, t, top, tl.maximum(floor, bottom), p, TILE)
        if least_share > 0.0:
            least = top + tl.log(least_share)
            last = tl.where(least > floor, vocab, last)
            floor = tl.maximum(floor, least)
        if excludes:
            mass = tl.zeros([TILE], tl.float32)
            for first in tl.range(0, vocab, TILE):
                score, token = _scores(logits, first, vocab, t, TILE)
                stays = (token < vocab) & ((score > floor) | ((score == floor) & (token <= last)))
                mass += tl.where(stays, tl.exp(score - top), 0.0)
            bound = tl.load(xtc_threshold + row) * tl.sum(mass, axis=0)
            likely = tl.zeros([TILE], tl.int32)
            lowest = tl.full([TILE], float("inf"), tl.float32)
            for first in tl.range(0, vocab, TILE):
                score, token = _scores(logits, first, vocab, t, TILE)
                stays = (token < vocab) & ((score > floor) | ((score == floor) & (token <= last)))
                above = stays & (tl.exp(score - top) >= bound)
                likely += above.to(tl.int32)
                lowest = tl.minimum(lowest, tl.where(above, score, float("inf")))
            if tl.sum(likely, axis=0) > 1:
                ceiling = tl.min(lowest, axis=0)
                spared = vocab
                for first in tl.range(0, vocab, TILE):
                    score, token = _scores(logits, first, vocab, t, TILE)
                    spared = tl.minimum(spared, tl.min(tl.where(score == ceiling, token, vocab), axis=0))
    tl.store(kept + row * 4, floor.to(tl.int32, bitcast=True))
    tl.store(kept + row * 4 + 1, last)
    tl.store(kept + row * 4 + 2, ceiling.to(tl.int32, bitcast=True))
    tl.store(kept + row * 4 + 3, spared)


def filtered(logits_RV: Tensor, draws: Draws) -> Kept:
    """What the filters of each row leave."""
    num_rows, vocab_size = logits_RV.shape
    kept = torch.empty(num_rows, 4, dtype=torch.int32, device=logits_RV.device)
    _filter[(num_rows,)](
        logits_RV,
        draws.temperature_R,
        draws.top_k_R,
        draws.top_p_R,
        draws.min_p_R,
        draws.xtc_probability_R,
        draws.xtc_threshold_R,
        draws.key_R,
        kept,
        logits_RV.stride(0),
        vocab_size,
        TILE=TILE,
        num_warps=16,
        OVERLAP=OVERLAP,
        launch_pdl=OVERLAP,
    )
    return kept
