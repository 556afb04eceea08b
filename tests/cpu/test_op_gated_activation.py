"""The gate of a gated MLP: providers against the reference, the reference against the formula."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cpu.op_cases import FLOATS, assert_close, providers, run
from troth.ops.gated_activation import Activation, gated_activation

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (7, 96), (3, 1536)], ids=str)
@pytest.mark.parametrize("provider", providers(gated_activation))
def test_gated_activation_equals_the_reference(
    provider: str, shape: tuple[int, int], activation: Activation, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    gate_up_T2I = (torch.randn(shape[0], 2 * shape[1]) * 3).to(dtype)
    before = gate_up_T2I.clone()
    got = run(gated_activation, provider, gate_up_T2I, activation)
    assert_close(gated_activation, got, gated_activation.reference(before, activation))


def test_gated_activation_reference_gates_the_second_half() -> None:
    x = torch.tensor([[1.5, -0.5, 2.0, 4.0]])
    silu = [1.5 / (1 + math.exp(-1.5)) * 2, -0.5 / (1 + math.exp(0.5)) * 4]
    assert gated_activation.reference(x, "silu")[0].tolist() == pytest.approx(silu, rel=1e-6)

    def gelu(v: float) -> float:
        return v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    got = gated_activation.reference(x, "gelu_tanh")[0].tolist()
    assert got == pytest.approx([gelu(1.5) * 2, gelu(-0.5) * 4], rel=1e-6)
