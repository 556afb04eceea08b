"""Experts through PyTorch: expert by expert on a CPU, in grouped products on a GPU.

On a GPU nothing waits for the host, so that decode steps can be captured.
Legend: as ``ops/experts.py``; J = 2 I, Q = T K, the pairs of a token and an expert it chose, O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.experts import PACKERS, RawExperts, Routing, experts
from troth.ops.gated_activation import gated_activation
from troth.ops.impl.expert_groups import ExpertLinears, grouped_experts, packed_each
from troth.ops.impl.torch_linear import DenseLinearWeight
from troth.ops.linear import PACKERS as LINEAR_PACKERS
from troth.ops.linear import RawLinearWeight, dense

GATHERED_PAIRS: Final = 32
"""Matrices that are copied side by side at once where products cannot be grouped: some hundred MB of real models."""


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """Ordinary matrices, all experts of a layer in two tensors."""

    gate_up_EJD: Tensor
    down_EDI: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, D, I)."""
        num_experts, width, inner = self.down_EDI.shape
        return num_experts, width, inner

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.gate_up_EJD.nbytes + self.down_EDI.nbytes


def _pack(raw: RawExperts, dtype: torch.dtype, device: torch.device) -> ExpertLinears | StackedExperts | None:
    if device.type == "cpu":
        return packed_each(LINEAR_PACKERS["torch"], raw, dtype, device)
    return stacked(raw, dtype, device)


PACKERS["torch"] = _pack


def stacked(raw: RawExperts, dtype: torch.dtype, device: torch.device) -> StackedExperts:
    """Every expert of a layer as plain numbers on ``device``."""

    def side_by_side(weights: Sequence[RawLinearWeight]) -> Tensor:
        all_EOI = torch.empty(len(weights), *weights[0].shape, dtype=dtype, device=device)
        for one_OI, weight in zip(all_EOI, weights, strict=True):
            begin = 0
            for part in weight.parts:
                one_OI[begin : begin + part.shape[0]] = dense(part, dtype, device)
                begin += part.shape[0]
        return all_EOI

    return StackedExperts(side_by_side(raw.gate_up), side_by_side(raw.down))


def _takes(
    x_TD: Tensor, scores_TF: Tensor, shared_TD: Tensor, weights: Any, routing: Routing, num_exact: int | None = None
) -> bool:
    if type(weights) is ExpertLinears:
        return type(weights.down[0]) is DenseLinearWeight
    return type(weights) is StackedExperts


@experts.provider("torch", supports=_takes)
def experts_torch(
    x_TD: Tensor,
    scores_TF: Tensor,
    shared_TD: Tensor,
    weights: Any,
    routing: Routing,
    num_exact: int | None = None,
) -> Tensor:
    """As ops.experts."""
    if isinstance(weights, ExpertLinears):
        return grouped_experts(x_TD, scores_TF, shared_TD, weights, routing, num_exact)
    if not len(x_TD):  # behind the last layer's attention nobody may look at any token
        return torch.empty_like(x_TD)
    chosen_TK, share_TK = routing.choose(scores_TF[:, :-1])
    order_Q = chosen_TK.flatten().argsort(stable=True)
    expert_Q = chosen_TK.flatten()[order_Q]
    gate_up_QJ = _products(x_TD[order_Q // routing.num_chosen], weights.gate_up_EJD, expert_Q)
    y_QD = _products(gated_activation(gate_up_QJ, "silu"), weights.down_EDI, expert_Q)
    # Back in the order of tokens: sums of each in one order, which adding by index would not give on a GPU.
    y_TKD = torch.empty_like(y_QD).index_copy_(0, order_Q, y_QD).unflatten(0, chosen_TK.shape)
    y_TD = scores_TF[:, -1:].float().sigmoid() * shared_TD
    return (y_TD + (y_TKD * share_TK[:, :, None]).sum(dim=1)).to(x_TD.dtype)


def _products(x_QI: Tensor, weight_EOI: Tensor, expert_Q: Tensor) -> Tensor:
    """Each row by its expert's matrix, [Q, O]; rows are in order of experts."""
    if _needs_the_host(x_QI) and torch.cuda.is_current_stream_capturing():
        return gathered_products(x_QI, weight_EOI, expert_Q)
    counts_E = torch.zeros(weight_EOI.shape[0], dtype=torch.int32, device=expert_Q.device)
    counts_E.scatter_add_(0, expert_Q, torch.ones_like(expert_Q, dtype=torch.int32))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x_QI, weight_EOI.transpose(1, 2), offs=ends_E)


def _needs_the_host(x_QI: Tensor) -> bool:
    """Whether grouped products fall apart into one product per group, for which the host asks the device."""
    return x_QI.is_cuda and (x_QI.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x_QI.device) < (9, 0))


def gathered_products(x_QI: Tensor, weight_EOI: Tensor, expert_Q: Tensor) -> Tensor:
    """The same by copies of the matrices, a few rows at a time: what is launched depends on shapes alone."""
    pairs = zip(x_QI.split(GATHERED_PAIRS), expert_Q.split(GATHERED_PAIRS), strict=True)
    return torch.cat([torch.bmm(weight_EOI[expert], x[:, :, None])[:, :, 0] for x, expert in pairs])
