"""Which quantised matrices round their inputs to 8 bits where that is asked for, and whether an artifact has any.

Refuses to know how inputs are rounded (``ops/linear.py``) and what becomes faster by it (``csrc/fours.h``).
"""

from __future__ import annotations

from typing import Final

from troth.artifact.artifact import Artifact
from troth.artifact.ggml_types import GgmlType

ROUNDING: Final = frozenset(
    {GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K}
)
"""Quants of up to six bits: products of wider ones would not become faster."""


def rounds_inputs(name: str, ggml_type: GgmlType) -> bool:
    """Whether a matrix of this name (Hugging Face's) and type is one: it belongs to a layer, not to the vocabulary."""
    return ".layers." in name and ggml_type in ROUNDING


def rounded_inputs_refusal(artifact: Artifact) -> str | None:
    """Why an artifact has no such matrices; None: it has."""
    if artifact.gguf is None:
        return "its matrices are plain numbers"
    tensors = [tensor for tensor in artifact.gguf.tensors.values() if tensor.name.startswith("blk.")]
    kinds = {tensor.ggml_type for tensor in tensors if len(tensor.shape) > 1}
    if kinds & ROUNDING:
        return None
    return f"its layers are {', '.join(sorted(kind.name for kind in kinds))}, none of {_names()}"


def _names() -> str:
    return ", ".join(sorted(kind.name for kind in ROUNDING))
