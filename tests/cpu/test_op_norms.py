"""RMSNorm alone, after a residual sum and before a gate: providers against references, these against the formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.op_cases import FLOATS, assert_close, cases, inputs, providers, run
from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.grid import Case
from troth.ops.multiply import multiply
from troth.ops.rms_norm import add_rms_norm, rms_norm
from troth.ops.sigmoid_gate import sigmoid_gate

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(rms_norm))
@pytest.mark.parametrize("provider", providers(rms_norm))
def test_rms_norm_equals_the_reference_and_keeps_its_input(provider: str, case: Case, dtype: torch.dtype) -> None:
    args = case.make(inputs(dtype))
    before = args[0].clone()
    assert_close(rms_norm, run(rms_norm, provider, *args), rms_norm.reference(*args))
    assert torch.equal(args[0], before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(add_rms_norm))
@pytest.mark.parametrize("provider", providers(add_rms_norm))
def test_add_rms_norm_equals_the_reference(provider: str, case: Case, dtype: torch.dtype) -> None:
    normed_want, total_want = add_rms_norm.reference(*case.make(inputs(dtype)))
    normed, total = run(add_rms_norm, provider, *case.make(inputs(dtype)))
    assert_close(add_rms_norm, normed, normed_want)
    assert_close(add_rms_norm, total, total_want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(gated_rms_norm))
@pytest.mark.parametrize("provider", providers(gated_rms_norm))
def test_gated_rms_norm_equals_the_reference_and_keeps_its_inputs(
    provider: str, case: Case, dtype: torch.dtype
) -> None:
    args = case.make(inputs(dtype))
    before = (args[0].clone(), args[1].clone())
    assert_close(gated_rms_norm, run(gated_rms_norm, provider, *args), gated_rms_norm.reference(*args))
    assert torch.equal(args[0], before[0])
    assert torch.equal(args[1], before[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(sigmoid_gate))
@pytest.mark.parametrize("provider", providers(sigmoid_gate))
def test_sigmoid_gate_equals_the_reference_and_keeps_its_inputs(provider: str, case: Case, dtype: torch.dtype) -> None:
    args = case.make(inputs(dtype))
    before = (args[0].clone(), args[1].clone())
    assert_close(sigmoid_gate, run(sigmoid_gate, provider, *args), sigmoid_gate.reference(*args))
    assert torch.equal(args[0], before[0])
    assert torch.equal(args[1], before[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(multiply))
@pytest.mark.parametrize("provider", providers(multiply))
def test_multiply_equals_the_reference_and_keeps_its_inputs(provider: str, case: Case, dtype: torch.dtype) -> None:
    args = case.make(inputs(dtype))
    before = (args[0].clone(), args[1].clone())
    assert_close(multiply, run(multiply, provider, *args), before[0] * before[1])
    assert_close(multiply, multiply.reference(*args), before[0] * before[1])
    assert torch.equal(args[0], before[0])
    assert torch.equal(args[1], before[1])


def test_norm_references_follow_their_formula() -> None:
    x = torch.tensor([[3.0, -4.0]])
    weight, root = torch.tensor([2.0, 0.5]), (12.5 + 0.5) ** 0.5
    want = torch.tensor([[6.0 / root, -2.0 / root]])
    torch.testing.assert_close(rms_norm.reference(x, weight, 0.5), want)
    normed, total = add_rms_norm.reference(x - 1, torch.ones(1, 2), weight, 0.5)
    torch.testing.assert_close(normed, want)
    assert torch.equal(total, x)
    gate = torch.tensor([[[0.3, -2.0]]])
    torch.testing.assert_close(gated_rms_norm.reference(x[None], gate, weight, 0.5), want[None] * F.silu(gate))
