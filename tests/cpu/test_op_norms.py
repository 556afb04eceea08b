"""RMSNorm alone, after a residual sum and before a gate: providers against references, these against the formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.op_cases import FLOATS, assert_close, providers, run
from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.rms_norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

SHAPES = [(1, 1), (1, 32), (3, 65), (5, 576), (2, 2560)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("provider", providers(rms_norm))
def test_rms_norm_equals_the_reference(provider: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_TD = (torch.randn(shape) * torch.tensor([[3.0]])).to(dtype)
    args = (x_TD, torch.randn(shape[1]) + 1, 1e-6)
    before = x_TD.clone()
    assert_close(rms_norm, run(rms_norm, provider, *args), rms_norm.reference(*args))
    assert torch.equal(x_TD, before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("provider", providers(add_rms_norm))
def test_add_rms_norm_equals_the_reference(provider: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_TD, residual_TD = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight_D = torch.randn(shape[1]) + 1
    normed_want, total_want = add_rms_norm.reference(x_TD.clone(), residual_TD.clone(), weight_D, 1e-6)
    normed, total = run(add_rms_norm, provider, x_TD, residual_TD, weight_D, 1e-6)
    assert_close(add_rms_norm, normed, normed_want)
    assert_close(add_rms_norm, total, total_want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", [(1, 1, 16), (3, 5, 24), (2, 8, 128)], ids=str)
@pytest.mark.parametrize("provider", providers(gated_rms_norm))
def test_gated_rms_norm_equals_the_reference(provider: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tokens, num_heads, width = heads
    x_THE = torch.randn(heads).to(dtype)
    # The gate arrives as a slice of a wider product.
    gate_THE = torch.randn(tokens, num_heads * width + 6).to(dtype)[:, 6:].unflatten(-1, (num_heads, width))
    args = (x_THE, gate_THE, torch.randn(width) + 1, 1e-6)
    before = (x_THE.clone(), gate_THE.clone())
    assert_close(gated_rms_norm, run(gated_rms_norm, provider, *args), gated_rms_norm.reference(*args))
    assert torch.equal(x_THE, before[0])
    assert torch.equal(gate_THE, before[1])


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
