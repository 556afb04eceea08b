"""The tensors of safetensors shards, as views of their mapped files.

Owns which dtypes become which; headers come from ``artifact/safetensors.py``. ``source.py`` is who asks.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from troth.artifact.safetensors import SafetensorsHeaders, SafetensorsTensor
from troth.errors import ModelLoadError
from troth.weights.mapped_file import MappedFile

_DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}


class SafetensorsStore:
    """A ``weights.source.Store`` over the shards of one model, each mapped once, for as long as its tensors
    live.

    Raises:
        ModelLoadError: a shard is gone or changed since its header was read.
    """

    norms_include_one = False

    def __init__(self, headers: SafetensorsHeaders) -> None:
        self.place = str(headers.shards[0].path.parent)
        self.tensors: dict[str, SafetensorsTensor] = {}
        self._files: dict[str, MappedFile] = {}
        for shard in headers.shards:
            file = MappedFile(shard.path, shard.stamp)
            self.tensors.update(shard.tensors)
            self._files.update(dict.fromkeys(shard.tensors, file))

    def read(self, name: str) -> Tensor:
        """The tensor in its stored dtype. Raises ModelLoadError for dtypes nothing here computes with."""
        tensor = self.tensors[name]
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            message = f"is of dtype {tensor.dtype}, which nothing here computes with; convert it to F32 or BF16"
            raise ModelLoadError(message, path=self.place, field=name)
        return self._files[name].tensor(tensor.offset, tensor.shape, dtype)
