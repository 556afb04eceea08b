"""Weights that are rounded to fp8 when a model is loaded: which, and what an artifact says of them.

Refuses to know how rows are rounded (``ops/codes.py``) and how products are computed (``ops/linear.py``): rounding
happens where a weight is packed, on its device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Final

from torch import Tensor

from troth.artifact.artifact import Artifact

_LAYERS: Final = re.compile(
    r"model\.(?:language_model\.)?layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.weight"
    r"|blk\.\d+\.(?:attn_(?:q|k|v|output)|ffn_(?:gate|up|down))\.weight"
)
"""Under Hugging Face names and those of GGUF. Not the embedding, the output layer, norms, draft heads and routers."""
_ROUNDABLE: Final = frozenset({"F32", "F16", "BF16"})
_SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Tensor:
    """A matrix of the artifact that is computed with as fp8: each row as codes with a scale of its own."""

    stored: Tensor = field(repr=False)
    """float [O, I], as the artifact holds it."""

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.stored.shape[0], self.stored.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return self.stored.nbytes


def is_rounded(name: str) -> bool:
    """Whether a tensor of this name is rounded."""
    return _LAYERS.fullmatch(name) is not None


def fp8_refusal(artifact: Artifact) -> str | None:
    """Why an artifact's weights cannot be rounded; None: they can."""
    kinds = {kind for name, kind, _ in _tensors(artifact) if is_rounded(name)}
    if not kinds:
        return "it has no attention and feed-forward layers of the names that are rounded"
    if kinds <= _ROUNDABLE:
        return None
    return f"its weights are {', '.join(sorted(kinds - _ROUNDABLE))} already"


def fp8_bytes(artifact: Artifact, element_bytes: int) -> int:
    """Bytes of all weights when those that are rounded take one each, and all others ``element_bytes``."""
    total = artifact.num_values * element_bytes
    for name, _, shape in _tensors(artifact):
        if is_rounded(name):
            total += shape[0] * _SCALE_BYTES - prod(shape) * (element_bytes - 1)
    return total


def _tensors(artifact: Artifact) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, kind of numbers and shape."""
    if artifact.gguf is not None:
        for tensor in artifact.gguf.tensors.values():
            yield tensor.name, tensor.ggml_type.name, tensor.shape
    for shard in artifact.safetensors.shards if artifact.safetensors is not None else ():
        for stored in shard.tensors.values():
            yield stored.name, stored.dtype, stored.shape
