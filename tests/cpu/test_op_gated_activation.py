"""The gate of a gated MLP: providers against the reference, the reference against the formula."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cpu.op_cases import FLOATS, assert_close, cases, inputs, providers, run
from troth.ops.gated_activation import gated_activation
from troth.ops.grid import Case

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(gated_activation))
@pytest.mark.parametrize("provider", providers(gated_activation))
def test_gated_activation_equals_the_reference(provider: str, case: Case, dtype: torch.dtype) -> None:
    gate_up_T2I, activation = case.make(inputs(dtype))
    want = gated_activation.reference(gate_up_T2I.clone(), activation)
    assert_close(gated_activation, run(gated_activation, provider, gate_up_T2I, activation), want)


def test_gated_activation_reference_gates_the_second_half() -> None:
    x = torch.tensor([[1.5, -0.5, 2.0, 4.0]])
    silu = [1.5 / (1 + math.exp(-1.5)) * 2, -0.5 / (1 + math.exp(0.5)) * 4]
    assert gated_activation.reference(x, "silu")[0].tolist() == pytest.approx(silu, rel=1e-6)

    def gelu(v: float) -> float:
        return v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    got = gated_activation.reference(x, "gelu_tanh")[0].tolist()
    assert got == pytest.approx([gelu(1.5) * 2, gelu(-0.5) * 4], rel=1e-6)
