"""The sampler's rows at the edges of what a request may ask for."""

from __future__ import annotations

import pytest
import torch

from troth.contracts.names import RequestId, Row
from troth.contracts.plan import Admission, StepPlan
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.run.sampler import Sampler

VOCAB = 50


def drawn(params: list[SamplingParams], logits_RV: torch.Tensor) -> list[int]:
    """What one step draws for rows with these parameters."""
    plan = StepPlan(0)
    for index, sampling in enumerate(params):
        request = Request(request_id=RequestId(str(index)), prompt_ids=(1,), sampling=sampling)
        plan.admissions.append(Admission(Row(index), request, [], 0))
        plan.rows.append(Row(index))
        plan.starts.append(0)
        plan.num_new.append(1)
        plan.sample_steps.append(0)
        plan.token_ids.append(1)
    sampler = Sampler()
    sampler.follow(plan)
    tokens: list[int] = sampler.draw(logits_RV, plan).token_S.tolist()
    return tokens


@pytest.mark.parametrize("top_p", [1e-300, 5e-324, 1e-45, 1e-30])
def test_sampler_keeps_the_best_token_at_any_top_p(top_p: float) -> None:
    """In float32 a tiny top_p is 0, kept no token, and the draw from none ended the engine."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    others = SamplingParams(temperature=0.0)
    assert drawn([SamplingParams(top_p=top_p, seed=7), others], logits) == best


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-40, 1e-38, 1e-31, 1e-29, 1e-9])
def test_sampler_draws_the_best_token_at_any_small_temperature(temperature: float) -> None:
    """Logits over a denormal temperature are infinite, all alike, and the first of them won."""
    logits = 30 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)) + 5
    best = logits.argmax(-1).tolist()
    warm = SamplingParams(temperature=temperature, min_p=0.1, top_p=0.9, top_k=40, seed=3)
    assert drawn([warm, SamplingParams(temperature=temperature, seed=4)], logits) == best


def test_sampler_draws_at_the_highest_temperature_and_penalties() -> None:
    extreme = SamplingParams(
        temperature=100.0,
        min_p=1.0,
        repetition_penalty=0.01,
        presence_penalty=2.0,
        frequency_penalty=-2.0,
        xtc_probability=1.0,
        xtc_threshold=0.0,
        logit_bias=tuple((token_id, -100.0) for token_id in range(VOCAB)),
    )
    logits = 1e4 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    (token_id,) = drawn([extreme], logits)
    assert 0 <= token_id < VOCAB
