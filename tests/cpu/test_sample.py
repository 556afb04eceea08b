"""The keyed draw: exact keys, right distributions, and independence of neighbours."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cpu.op_cases import CPU
from troth.ops.penalise import Touched, penalise
from troth.ops.sample import Draws, draws_of, gumbel_noise, sample, step_key


def draws(*rows: dict[str, float], keys: list[int]) -> Draws:
    return draws_of(rows, keys, CPU)


def histogram(logits: torch.Tensor, num_draws: int = 4_000, **row: float) -> torch.Tensor:
    """Frequencies of tokens over many steps of one seed."""
    rows = [row] * 500
    counts = torch.zeros(logits.shape[0])
    for begin in range(0, num_draws, 500):
        keys = [step_key(7, begin + i) for i in range(500)]
        ids = sample(logits.expand(500, -1).clone(), draws(*rows, keys=keys))
        counts += torch.bincount(ids, minlength=logits.shape[0])
    return counts / num_draws


def assert_close_to(freq: torch.Tensor, probs: torch.Tensor, num_draws: int = 4_000) -> None:
    """Five standard errors: about one false alarm in a million per token."""
    error = 5 * (probs * (1 - probs) / num_draws).sqrt() + 1e-9
    assert ((freq - probs).abs() <= error).all(), (freq, probs)


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def test_step_key_has_the_published_values() -> None:
    assert [step_key(0, s) for s in range(3)] == [0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A, 0xDAA66D2C7DDF743F]
    assert [step_key(42, s) & 0xFFFF for s in range(3)] == [0x7C3F, 0xF800, 0x7415]


def test_sample_follows_the_softmax_at_temperature_one() -> None:
    assert_close_to(histogram(LOGITS), LOGITS.softmax(0))


def test_sample_divides_by_the_temperature() -> None:
    assert_close_to(histogram(LOGITS, temperature=2.5), (LOGITS / 2.5).softmax(0))


def test_sample_top_k_keeps_ties_at_the_threshold() -> None:
    logits = torch.tensor([1.0, 0.0, 0.0, -1.0])
    kept = torch.tensor([1.0, 0.0, 0.0, -math.inf]).softmax(0)
    assert_close_to(histogram(logits, top_k=2), kept)


def test_sample_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    probs = LOGITS.softmax(0)
    assert probs[0] < 0.7 < probs[:2].sum()
    kept = torch.where(torch.arange(6) < 2, LOGITS, -math.inf).softmax(0)
    assert_close_to(histogram(LOGITS, top_p=0.7), kept)


def test_sample_top_p_below_the_best_token_keeps_that_token() -> None:
    assert histogram(LOGITS, num_draws=500, top_p=0.01)[0] == 1.0


def test_sample_min_p_drops_what_is_unlikely_beside_the_best() -> None:
    probs = LOGITS.softmax(0)
    kept = torch.where(probs >= 0.2 * probs.max(), LOGITS, -math.inf).softmax(0)
    assert 1 < int((kept > 0).sum()) < 6
    assert_close_to(histogram(LOGITS, min_p=0.2), kept)


def test_sample_xtc_drops_the_top_choices_but_the_last_of_them() -> None:
    probs = LOGITS.softmax(0)
    above = (probs >= 0.1).nonzero().squeeze(1)
    spared = above[-1]
    mask = torch.ones(6, dtype=torch.bool)
    mask[above] = False
    mask[spared] = True
    excluded = torch.where(mask, LOGITS, -math.inf).softmax(0)
    freq = histogram(LOGITS, xtc_probability=0.5, xtc_threshold=0.1)
    assert_close_to(freq, 0.5 * probs + 0.5 * excluded)
    assert_close_to(histogram(LOGITS, xtc_probability=1.0, xtc_threshold=0.1), excluded)


def test_sample_xtc_leaves_a_single_top_choice_alone() -> None:
    logits = torch.tensor([5.0, 0.0, 0.0])
    assert_close_to(histogram(logits, xtc_probability=1.0, xtc_threshold=0.5), logits.softmax(0))


def test_sample_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0]])
    assert sample(logits, draws({"temperature": 0.0}, {"temperature": 0.0}, keys=[1, 2])).tolist() == [1, 0]


def test_sample_mixes_greedy_and_random_rows() -> None:
    logits = LOGITS.expand(2, -1).clone()
    ids = sample(logits, draws({"temperature": 0.0}, {"temperature": 1.0}, keys=[1, step_key(3, 5)]))
    alone = sample(LOGITS[None].clone(), draws({"temperature": 1.0}, keys=[step_key(3, 5)]))
    assert ids.tolist() == [0, int(alone)]


def test_sample_does_not_depend_on_the_other_rows_or_their_number() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 300)
    rows = [{"temperature": 0.3 + 0.1 * i, "top_k": i % 7, "top_p": 1 - 0.02 * i} for i in range(40)]
    keys = [step_key(i, 3 * i) for i in range(40)]
    together = sample(logits.clone(), draws(*rows, keys=keys))
    alone = [int(sample(logits[i : i + 1].clone(), draws(rows[i], keys=keys[i : i + 1]))) for i in range(40)]
    assert together.tolist() == alone


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_gumbel_noise_is_finite_and_has_the_right_mean_and_variance(key: int) -> None:
    noise = gumbel_noise(key, torch.arange(400_000))
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03


def test_gumbel_noise_of_a_token_is_the_same_in_any_selection() -> None:
    whole = gumbel_noise(99, torch.arange(1000))
    some = torch.tensor([5, 999, 17])
    assert torch.equal(gumbel_noise(99, some), whole[some])


def test_gumbel_noise_reaches_the_far_tail() -> None:
    """The best of a million draws lies near ln(1e6) = 13.8; 24-bit uniforms would still reach it, 16-bit ones not."""
    assert float(gumbel_noise(5, torch.arange(1_000_000)).max()) > 11.5


def test_penalise_applies_repetition_then_subtraction() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0], [2.0, -2.0, 1.0]])
    touched = Touched(
        row_N=torch.tensor([0, 0, 1]),
        token_N=torch.tensor([0, 1, 2]),
        repetition_N=torch.tensor([2.0, 2.0, 1.0]),
        subtract_N=torch.tensor([0.0, 0.5, -3.0]),
    )
    penalise(logits, touched)
    assert logits.tolist() == [[1.0, -4.5, 1.0], [2.0, -2.0, 4.0]]
