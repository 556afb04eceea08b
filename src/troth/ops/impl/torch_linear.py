"""Linear layers and embeddings through PyTorch's own kernels: weights lie dense in the activations' dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.embedding import embedding
from troth.ops.gated_activation import Activation, gated_activation
from troth.ops.linear import PACKERS, RawWeight, dense, linear
from troth.weights.fp8 import Fp8Tensor
from troth.weights.quantized import QuantTensor


@dataclass(frozen=True, slots=True)
class DenseLinearWeight:
    """An ordinary matrix."""

    weight_OI: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.weight_OI.shape[0], self.weight_OI.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return self.weight_OI.numel() * self.weight_OI.element_size()


def _pack(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> DenseLinearWeight | None:
    if any(isinstance(part, Fp8Tensor) or (isinstance(part, QuantTensor) and part.inputs) for part in parts):
        return None
    if len(parts) == 1:
        return DenseLinearWeight(dense(parts[0], dtype, device))
    rows = sum(part.shape[0] for part in parts)
    weight_OI = torch.empty(rows, parts[0].shape[1], dtype=dtype, device=device)
    begin = 0
    for part in parts:
        weight_OI[begin : begin + part.shape[0]] = dense(part, dtype, device)
        begin += part.shape[0]
    return DenseLinearWeight(weight_OI)


PACKERS["torch"] = _pack


@linear.provider("torch", supports=lambda x_TI, weight, *rest: type(weight) is DenseLinearWeight)
def linear_torch(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> Tensor:
    """As ops.linear."""
    return F.linear(x_TI, weight.weight_OI, bias_O)


@embedding.provider("torch", supports=lambda token_ids_T, weight, dtype, scale=1.0: type(weight) is DenseLinearWeight)
def embedding_torch(token_ids_T: Tensor, weight: Any, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """As ops.embedding."""
    rows_TD = weight.weight_OI[token_ids_T].to(dtype)
    return rows_TD if scale == 1.0 else rows_TD.mul_(scale)


@gated_activation.provider("torch")
def gated_activation_torch(gate_up_T2I: Tensor, activation: Activation) -> Tensor:
    """As ops.gated_activation."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    gated_TI = F.silu(gate_TI) if activation == "silu" else F.gelu(gate_TI, approximate="tanh")
    return gated_TI.mul_(up_TI)
