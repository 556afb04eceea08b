"""Linear layers and embeddings on weights in file layout: nothing is repacked, quantised rows stay mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.embedding import embedding
from troth.ops.impl import cpu
from troth.ops.linear import PACKERS, RawWeight, linear, raw_bytes
from troth.weights.quantized import QuantTensor

INPUTS_MULTIPLE: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class CpuLinearWeight:
    """Rows of blocks or numbers as the file holds them, and their addresses."""

    parts: tuple[RawWeight, ...]
    kernel: Any
    """_cpu.Weight; its addresses are those of ``parts``, which keep them valid."""
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, shared with the page cache where the file is mapped."""
        return sum(raw_bytes(part) for part in self.parts)


def _pack(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> CpuLinearWeight | None:
    if device.type != "cpu" or dtype != torch.float32 or parts[0].shape[1] % INPUTS_MULTIPLE:
        return None
    if not all(_is_readable(part) for part in parts):
        return None
    held = tuple(part if isinstance(part, QuantTensor) else part.contiguous() for part in parts)
    inputs = held[0].shape[1]
    kernel = cpu._module().Weight(inputs)
    for part in held:
        if isinstance(part, QuantTensor):
            rows, number = part.raw, cpu.FORMATS[part.ggml_type]
        else:
            rows, number = part, cpu.DENSE_FORMATS[part.dtype]
        kernel.add(number, rows.data_ptr(), rows.stride(0) * rows.element_size(), part.shape[0])
    return CpuLinearWeight(held, kernel, (kernel.outputs, inputs))


def _is_readable(part: RawWeight) -> bool:
    if isinstance(part, QuantTensor):
        return part.ggml_type in cpu.FORMATS and part.raw.is_contiguous()
    return part.dtype in cpu.DENSE_FORMATS


PACKERS["cpu"] = _pack


def _takes_linear(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> bool:
    return type(weight) is CpuLinearWeight and x_TI.dtype == torch.float32


@linear.provider("cpu", supports=_takes_linear)
def linear_cpu(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> Tensor:
    """As ops.linear. Beyond ``num_exact`` tokens, products are bf16 where the processor multiplies those directly."""
    x_TI = x_TI.contiguous()
    num_tokens = x_TI.shape[0]
    exact = num_tokens if num_exact is None else num_exact
    y_TO = torch.empty(num_tokens, weight.shape[0])
    rounded = None
    if exact < num_tokens and cpu.bf16_products():
        rounded = torch.empty(num_tokens - exact, weight.shape[1], dtype=torch.bfloat16)
    cpu.operations(x_TI, weight, bias_O, rounded, results=(y_TO,)).linear(
        weight.kernel,
        0 if bias_O is None else bias_O.data_ptr(),
        x_TI.data_ptr(),
        y_TO.data_ptr(),
        exact,
        num_tokens,
        0 if rounded is None else rounded.data_ptr(),
    )
    return y_TO


def _takes_embedding(token_ids_T: Tensor, weight: Any, dtype: torch.dtype, scale: float = 1.0) -> bool:
    return type(weight) is CpuLinearWeight and dtype == torch.float32


@embedding.provider("cpu", supports=_takes_embedding)
def embedding_cpu(token_ids_T: Tensor, weight: Any, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """As ops.embedding. Ids must be inside the table: addresses are not checked."""
    y_TD = torch.empty(token_ids_T.shape[0], weight.shape[1])
    operations = cpu.operations(token_ids_T, weight, results=(y_TD,))
    operations.embedding(weight.kernel, token_ids_T.data_ptr(), scale, y_TD.data_ptr(), token_ids_T.shape[0])
    return y_TD
