"""The tensors of a GGUF under Hugging Face names, with the rows of llama's queries and keys put back.

Owns what GGUF files do to a checkpoint: names, row order, quantised blocks, norms stored as 1 + weight. The
header comes from ``artifact/gguf.py``, the tables from ``naming.py``; ``source.py`` is who asks.

Llama's converter stores the d rows of each query and key head in rotary pairs: 0, d/2, 1, d/2 + 1 and so on,
for kernels that rotate neighbours. The models here rotate halves, so rows go back to 0, 1, 2 ... d - 1.
"""

from __future__ import annotations

import math
from typing import Final, NoReturn

import torch
from torch import Tensor

from troth.artifact.ggml_types import GgmlType
from troth.artifact.gguf import GgufHeader, GgufTensor
from troth.errors import ModelLoadError
from troth.weights.mapped_file import MappedFile
from troth.weights.naming import GGUF_NAMING, GgufNaming
from troth.weights.quantized import DEQUANTISABLE, QuantTensor

_DENSE: Final = {
    GgmlType.F32: torch.float32,
    GgmlType.F16: torch.float16,
    GgmlType.BF16: torch.bfloat16,
    GgmlType.I8: torch.int8,
    GgmlType.I16: torch.int16,
    GgmlType.I32: torch.int32,
    GgmlType.I64: torch.int64,
}


class GgufStore:
    """A ``weights.source.Store`` over one GGUF file, mapped for as long as its tensors live.

    Raises:
        ModelLoadError: the architecture has no table of names, or the file changed since its header was read.
    """

    norms_include_one = True

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.place = str(header.path)
        self._naming = _naming(header)
        self.tensors: dict[str, GgufTensor] = {}
        for tensor in header.tensors.values():
            name = self._naming.hugging_face(tensor.name)
            if name in self.tensors:
                self._fail(tensor, f"means {name}, which {self.tensors[name].name} means too")
            self.tensors[name] = tensor
        self._file = MappedFile(header.path, header.stamp)

    def read(self, name: str) -> Tensor | QuantTensor:
        """Dense types as tensors of their shape, quantised matrices as QuantTensor, both views of the map."""
        tensor = self.tensors[name]
        order = self._row_order(tensor)
        dtype = _DENSE.get(tensor.ggml_type)
        if dtype is not None:
            dense = self._file.tensor(tensor.offset, tensor.shape, dtype)
            return dense if order is None else dense.index_select(0, order)
        if tensor.ggml_type not in DEQUANTISABLE:
            self._fail(tensor, f"is of type {tensor.ggml_type.name}, which nothing here computes with")
        *outer, num_values = tensor.shape
        shape = (math.prod(outer), num_values)
        raw_shape = (shape[0], tensor.ggml_type.row_bytes(num_values))
        blocks = QuantTensor(tensor.ggml_type, shape, self._file.tensor(tensor.offset, raw_shape, torch.uint8))
        if len(tensor.shape) != 2:
            return blocks.dequantize().reshape(tensor.shape)
        return blocks if order is None else blocks.reordered(order)

    def _row_order(self, tensor: GgufTensor) -> Tensor | None:
        """For each row as the models want it, the row of the file; None when they are the same."""
        key = self._naming.head_count_key(tensor.name)
        if key is None:
            return None
        num_heads = self._header.metadata.get(key, self._header.metadata.get("llama.attention.head_count"))
        num_rows = tensor.shape[0] if tensor.shape else 0
        if type(num_heads) is not int or num_heads < 1 or num_rows % (2 * num_heads):
            self._fail(tensor, f"has {num_rows} rows, which {key} = {num_heads!r:.40} does not cut into heads")
        pairs = torch.arange(num_rows).reshape(num_heads, -1, 2)
        return pairs.transpose(1, 2).reshape(-1)

    def _fail(self, tensor: GgufTensor, message: str) -> NoReturn:
        raise ModelLoadError(message, path=self.place, field=tensor.name)


def _naming(header: GgufHeader) -> GgufNaming:
    architecture = header.metadata.get("general.architecture")
    naming = GGUF_NAMING.get(architecture) if isinstance(architecture, str) else None
    if naming is None:
        known = ", ".join(GGUF_NAMING)
        message = f"GGUF architecture {architecture!r:.40} has no table of names; known are {known}"
        raise ModelLoadError(message, path=str(header.path), field="general.architecture")
    return naming
