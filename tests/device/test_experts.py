"""Experts on the GPU: grouped products against the reference, and captured steps that choose anew when replayed."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.op_cases import assert_close, cases
from troth.ops import registry
from troth.ops.experts import PACKERS, experts
from troth.ops.grid import Case, Inputs
from troth.ops.impl import triton as kernels

REASON = kernels.unavailable()
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(REASON is not None or kernels.INTERPRETED, reason=f"there is no GPU: {REASON}"),
]
GPU = torch.device("cuda")
if REASON is None and not kernels.INTERPRETED:
    registry.activate()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", cases(experts))
def test_experts_equal_the_reference(case: Case, dtype: torch.dtype) -> None:
    x_TD, scores_TF, shared_TD, raw, routing = case.make(Inputs(dtype, GPU))
    got = experts(x_TD, scores_TF, shared_TD, PACKERS["torch"](raw, dtype, GPU), routing)
    assert_close(experts, got, experts.reference(x_TD, scores_TF, shared_TD, raw, routing))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_captured_step_chooses_anew_whenever_it_is_replayed(dtype: torch.dtype) -> None:
    """Nothing waits for the host, in float32 because the chosen matrices are copied."""
    (case,) = (case for case in experts.grid() if case.name == "F32-5x32x64x2-19")
    x_TD, scores_TF, shared_TD, raw, routing = case.make(Inputs(dtype, GPU))
    weights = PACKERS["torch"](raw, dtype, GPU)
    experts(x_TD, scores_TF, shared_TD, weights, routing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got_TD = experts(x_TD, scores_TF, shared_TD, weights, routing)
    x_TD.copy_(Inputs(dtype, GPU, seed=5).normal(*x_TD.shape))
    scores_TF.copy_(scores_TF.flip(1))
    graph.replay()
    assert_close(experts, got_TD, experts.reference(x_TD, scores_TF, shared_TD, raw, routing))
