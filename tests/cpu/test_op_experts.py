"""Choosing among experts: providers against the reference, the reference against the formula, choices by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cpu.op_cases import CPU, FLOATS, assert_close, cases, inputs, providers, run
from troth.ops.experts import PACKERS, RawExperts, Routing, experts, pack_experts
from troth.ops.grid import Case
from troth.ops.impl import cpu
from troth.ops.impl.torch_experts import gathered_products, stacked
from troth.ops.linear import RawLinearWeight

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

CASE = "F32-5x32x64x2-19"


def arguments(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Those of one case."""
    (case,) = (case for case in experts.grid() if case.name == name)
    return case.make(inputs(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(experts))
@pytest.mark.parametrize("provider", providers(experts))
def test_experts_equal_the_reference(provider: str, case: Case, dtype: torch.dtype) -> None:
    x_TD, scores_TF, shared_TD, raw, routing = case.make(inputs(dtype))
    form = PACKERS[provider](raw, dtype, CPU)
    if form is None:
        pytest.skip(f"{provider} does not pack these weights")
    assert form.shape == raw.shape
    got = run(experts, provider, x_TD, scores_TF, shared_TD, form, routing)
    assert_close(experts, got, experts.reference(x_TD, scores_TF, shared_TD, raw, routing))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(experts))
def test_experts_side_by_side_as_on_a_gpu_equal_the_reference(case: Case, dtype: torch.dtype) -> None:
    x_TD, scores_TF, shared_TD, raw, routing = case.make(inputs(dtype))
    got = run(experts, "torch", x_TD, scores_TF, shared_TD, stacked(raw, dtype, CPU), routing)
    assert_close(experts, got, experts.reference(x_TD, scores_TF, shared_TD, raw, routing))


def test_products_by_copied_matrices_equal_grouped_ones() -> None:
    """More rows than are copied at once, and experts that nobody chose."""
    made = inputs()
    x_QI, weight_EOI = made.normal(70, 8), made.normal(5, 3, 8)
    expert_Q = torch.tensor([0] * 40 + [3] * 30)
    want = torch.stack([weight @ x for x, weight in zip(x_QI, weight_EOI[expert_Q], strict=True)])
    torch.testing.assert_close(gathered_products(x_QI, weight_EOI, expert_Q), want)


def test_experts_reference_weighs_the_chosen_by_their_shares_and_adds_the_shared_one() -> None:
    def expert(gate: float, up: float, down: float) -> tuple[RawLinearWeight, RawLinearWeight]:
        return RawLinearWeight((torch.tensor([[gate], [up]]),)), RawLinearWeight((torch.tensor([[down]]),))

    gate_up, down = zip(expert(1.0, 2.0, 3.0), expert(-1.0, 1.0, 5.0), expert(0.5, 1.0, 7.0), strict=True)
    x, scores = torch.tensor([[2.0]]), torch.tensor([[0.0, -1.0, 1.0, 0.3]])
    silu = [torch.nn.functional.silu(torch.tensor(2.0 * gate)).item() for gate in (1.0, 0.5)]
    outputs = [silu[0] * 4.0 * 3.0, silu[1] * 2.0 * 7.0]
    of_all = scores[0, :3].softmax(0)[[0, 2]].tolist()
    shared = torch.tensor(0.3).sigmoid().item() * 11.0
    for renormalises, whole in ((False, 1.0), (True, sum(of_all))):
        want = shared + sum(share / whole * output for share, output in zip(of_all, outputs, strict=True))
        raw = RawExperts(gate_up, down)
        got = experts.reference(x, scores, torch.tensor([[11.0]]), raw, Routing(2, renormalises))
        assert got.item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("provider", providers(experts))
def test_experts_of_a_token_do_not_depend_on_its_company(provider: str) -> None:
    x_TD, scores_TF, shared_TD, raw, routing = arguments(CASE)
    form = PACKERS[provider](raw, torch.float32, CPU)
    together = run(experts, provider, x_TD, scores_TF, shared_TD, form, routing)
    for t in range(3):
        one = slice(t, t + 1)
        alone = run(experts, provider, x_TD[one], scores_TF[one], shared_TD[one], form, routing)
        assert_close(experts, alone, together[one])


def test_experts_of_no_token_are_nothing() -> None:
    """As behind the last layer's attention in a step that ends no prompt."""
    x_TD, scores_TF, shared_TD, raw, routing = (a[:0] if isinstance(a, torch.Tensor) else a for a in arguments(CASE))
    assert experts.reference(x_TD, scores_TF, shared_TD, raw, routing).shape == (0, 32)
    for form in (pack_experts(raw, torch.float32, CPU), stacked(raw, torch.float32, CPU)):
        assert experts(x_TD, scores_TF, shared_TD, form, routing).shape == (0, 32)


@pytest.mark.skipif("cpu" not in experts.active, reason="the kernels are not built")
def test_a_recording_chooses_anew_whenever_it_runs() -> None:
    x_TD, scores_TF, shared_TD, raw, routing = arguments(CASE)
    weights = pack_experts(raw, torch.float32, CPU)
    with cpu.recording() as tape:
        got = experts(x_TD, scores_TF, shared_TD, weights, routing)
    x_TD.copy_(inputs(seed=5).normal(*x_TD.shape))
    scores_TF.copy_(scores_TF.flip(1))
    tape.spoil()
    tape.run()
    assert_close(experts, got, experts.reference(x_TD, scores_TF, shared_TD, raw, routing))


@pytest.mark.skipif("cpu" not in experts.active, reason="the kernels are not built")
def test_what_pytorch_computes_between_recorded_operations_is_spoilt() -> None:
    """It stayed as it was, so that a recording without it gave the proof's own result and passed."""
    x_TD, scores_TF, shared_TD, raw, routing = arguments("F32-5x32x64x2-2-shares-of-all")
    with cpu.recording() as tape:
        between = shared_TD * 2.0
        view = between[:1]
        experts(x_TD, scores_TF, between, pack_experts(raw, torch.float32, CPU), routing)
    before = shared_TD.clone()
    tape.spoil()
    assert between.isnan().all()
    assert view.isnan().all()
    assert torch.equal(shared_TD, before), "what was given is not the recording's"
