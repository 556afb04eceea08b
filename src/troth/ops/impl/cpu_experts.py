"""Experts by the C++ kernels: those that tokens chose, product by product, where the file is mapped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from troth.ops.experts import PACKERS, RawExperts, Routing, experts
from troth.ops.impl import cpu
from troth.ops.impl.cpu_linear import CpuLinearWeight
from troth.ops.impl.expert_groups import ExpertLinears, grouped_experts, packed_each
from troth.ops.linear import PACKERS as LINEAR_PACKERS


def _pack(raw: RawExperts, dtype: torch.dtype, device: torch.device) -> ExpertLinears | None:
    return packed_each(LINEAR_PACKERS["cpu"], raw, dtype, device)


PACKERS["cpu"] = _pack


def _takes(
    x_TD: Tensor, scores_TF: Tensor, shared_TD: Tensor, weights: Any, routing: Routing, num_exact: int | None = None
) -> bool:
    return type(weights) is ExpertLinears and type(weights.down[0]) is CpuLinearWeight and x_TD.dtype == torch.float32


@experts.provider("cpu", supports=_takes)
def experts_cpu(
    x_TD: Tensor,
    scores_TF: Tensor,
    shared_TD: Tensor,
    weights: Any,
    routing: Routing,
    num_exact: int | None = None,
) -> Tensor:
    """As ops.experts. Which products are computed is seen anew each time a recording runs."""
    y_TD = torch.empty_like(x_TD)

    def compute() -> None:
        y_TD.copy_(grouped_experts(x_TD, scores_TF, shared_TD, weights, routing, num_exact))

    cpu.call(compute, results=(y_TD,))
    return y_TD
