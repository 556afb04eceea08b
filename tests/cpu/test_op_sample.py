"""Providers of the keyed draw and of the check before it, against their references."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cpu.op_cases import CPU, cases, inputs, providers, run
from troth.ops.all_finite import all_finite
from troth.ops.grid import Case
from troth.ops.sample import draws_of, sample, step_key

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize("case", cases(sample))
@pytest.mark.parametrize("provider", providers(sample))
def test_sample_draws_what_the_reference_draws(provider: str, case: Case) -> None:
    assert torch.equal(run(sample, provider, *case.make(inputs())), sample.reference(*case.make(inputs())))


@pytest.mark.parametrize("case", cases(all_finite))
@pytest.mark.parametrize("provider", providers(all_finite))
def test_all_finite_equals_the_reference(provider: str, case: Case) -> None:
    assert torch.equal(run(all_finite, provider, *case.make(inputs())), all_finite.reference(*case.make(inputs())))


FILTERS = [
    {},
    {"temperature": 0.2},
    {"temperature": 4.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 500},
    {"top_p": 1e-30},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "top_p": 0.95},
]


@pytest.mark.parametrize("provider", providers(sample))
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_sample_draws_what_the_reference_draws_many_times(provider: str, filters: dict[str, float]) -> None:
    """Flat, peaked, tied and masked logits under many keys."""
    torch.manual_seed(1)
    for spread, vocab in ((0.1, 400), (1.0, 1000), (6.0, 333)):
        logits_RV = (spread * torch.randn(20, vocab)).round(decimals=1)
        logits_RV[:, ::7] = -math.inf
        draws = draws_of([filters] * 20, [step_key(vocab, i) for i in range(20)], CPU)
        want = sample.reference(logits_RV.clone(), draws)
        assert torch.equal(run(sample, provider, logits_RV.clone(), draws), want)


@pytest.mark.parametrize("provider", providers(sample))
def test_sample_greedy_takes_the_lowest_id_among_equals(provider: str) -> None:
    logits_RV = torch.zeros(3, 100)
    logits_RV[1, 40] = logits_RV[1, 77] = 2.0
    logits_RV[2, 99] = 1.0
    draws = draws_of([{"temperature": 0.0}] * 3, [0, 1, 2], CPU)
    assert run(sample, provider, logits_RV, draws).tolist() == [0, 40, 99]
    # Far apart in a long row: providers look through it piece by piece.
    logits_RV = torch.full((4, 5003), -1.0)
    for r, ids in enumerate(((1023, 1024), (2900, 1500, 4999), (5002,), (4096, 4100))):
        logits_RV[r, list(ids)] = 3.0
    draws = draws_of([{"temperature": 0.0}] * 4, [0, 1, 2, 3], CPU)
    assert run(sample, provider, logits_RV, draws).tolist() == [1023, 1500, 5002, 4096]
