"""Linear layers and embeddings on the CPU: quantised rows are laid out anew at load, plain numbers stay as they are.

Quantised rows go side by side in groups of 16 (``csrc/packed.h``): the same bits in an order that a processor reads at
memory speed. Numbers are used where the file is mapped. docs/adr/0008 says why there is no file of packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from troth.ops.embedding import embedding
from troth.ops.impl import cpu
from troth.ops.impl.large_pages import LargePages
from troth.ops.linear import PACKERS, RawWeight, linear
from troth.weights.affine import AffineTensor
from troth.weights.quantized import QuantTensor

if TYPE_CHECKING:
    from troth._cpu import Weight

INPUTS_MULTIPLE: Final = 32
GROUP_ROWS: Final = 16
_PAGES: Final = LargePages()


@dataclass(frozen=True, slots=True, eq=False)
class CpuLinearWeight:
    """Rows of numbers as the file holds them or groups of packed rows, and their addresses."""

    memory: tuple[Tensor, ...]
    """One per run of like parts: uint8 [groups, bytes of a group], or float [O, I]."""
    kernel: Weight
    """_cpu.Weight; its addresses are those of ``memory``, which keeps them valid."""
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes in memory; those of plain numbers are shared with the page cache where the file is mapped."""
        return sum(part.numel() * part.element_size() for part in self.memory)


@dataclass(frozen=True, slots=True, eq=False)
class _Readable:
    """Rows that the kernels read."""

    number: int
    """Of their format, as ``csrc/arguments.h`` counts."""
    held: Tensor | AffineTensor
    """uint8 [O, bytes of a row of blocks], float [O, I], or codes that become blocks when their turn comes."""
    is_rounded: bool = False
    """Whether inputs meet them as 8 bits."""

    @property
    def num_rows(self) -> int:
        """O."""
        return self.held.shape[0]

    @property
    def is_blocks(self) -> bool:
        """Whether they are quantised, and want to be laid out anew."""
        return isinstance(self.held, AffineTensor) or self.held.dtype == torch.uint8


def _pack(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> CpuLinearWeight | None:
    if device.type != "cpu" or dtype != torch.float32 or parts[0].shape[1] % INPUTS_MULTIPLE:
        return None
    read = [_read(part) for part in parts]
    if any(rows is None for rows in read):
        return None
    inputs = parts[0].shape[1]
    kernel = cpu.new_weight(inputs)
    memory = []
    for run in _runs([rows for rows in read if rows is not None]):
        num_rows, first = sum(rows.num_rows for rows in run), run[0].held
        if isinstance(first, AffineTensor) or run[0].is_blocks:
            held = _grouped(run, inputs, num_rows)
        else:
            held = first.contiguous()
        kernel.add(run[0].number, held.data_ptr(), held.stride(0) * held.element_size(), num_rows, run[0].is_rounded)
        memory.append(held)
    return CpuLinearWeight(tuple(memory), kernel, (kernel.outputs, inputs))


def _read(part: RawWeight) -> _Readable | None:
    """A weight as the kernels can read it; None: they cannot."""
    if isinstance(part, QuantTensor) and part.ggml_type in cpu.FORMATS and part.raw.is_contiguous():
        return _Readable(cpu.FORMATS[part.ggml_type], part.raw, part.inputs is not None)
    if isinstance(part, AffineTensor):
        return _Readable(cpu.AFFINE_FORMATS[part.bits, part.group_values], part)
    if isinstance(part, Tensor) and part.dtype in cpu.DENSE_FORMATS:
        return _Readable(cpu.DENSE_FORMATS[part.dtype], part)
    return None


def _runs(parts: Sequence[_Readable]) -> list[list[_Readable]]:
    """Neighbours that can lie in one piece: quantised alike, and whole groups up to the last."""
    runs: list[list[_Readable]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and part.is_blocks
            and (part.number, part.is_rounded) == (last.number, last.is_rounded)
            and last.num_rows % GROUP_ROWS == 0
        ):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _grouped(parts: Sequence[_Readable], inputs: int, num_rows: int) -> Tensor:
    """uint8 [groups, bytes of a group]: all rows side by side; those past the last are zero."""
    group_bytes = cpu.group_bytes(parts[0].number, inputs)
    groups = -(-num_rows // GROUP_ROWS)
    memory = _PAGES.take(groups * group_bytes).view(groups, group_bytes)
    first = 0
    for part in parts:
        blocks = part.held.blocks() if isinstance(part.held, AffineTensor) else part.held
        cpu.pack_rows(part.number, blocks, part.num_rows, inputs, memory[first:])
        first += -(-part.num_rows // GROUP_ROWS)
    return memory


PACKERS["cpu"] = _pack


def _takes_linear(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> bool:
    return type(weight) is CpuLinearWeight and x_TI.dtype == torch.float32


@linear.provider("cpu", supports=_takes_linear)
def linear_cpu(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> Tensor:
    """As ops.linear. Quantised weights meet inputs of 16 bits (``csrc/pairs.h``) or 8 (``csrc/fours.h``), by 32.

    Beyond ``num_exact`` tokens, products are bf16 where the processor multiplies those directly.
    """
    x_TI = x_TI.contiguous()
    num_tokens = x_TI.shape[0]
    exact = num_tokens if num_exact is None else min(num_exact, num_tokens)
    y_TO = torch.empty(num_tokens, weight.shape[0])
    scratch = cpu.product_scratch(weight.kernel, exact, num_tokens)
    cpu.operations(x_TI, weight, bias_O, scratch, results=(y_TO,)).linear(
        weight.kernel,
        0 if bias_O is None else bias_O.data_ptr(),
        x_TI.data_ptr(),
        y_TO.data_ptr(),
        exact,
        num_tokens,
        0 if scratch is None else scratch.data_ptr(),
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
