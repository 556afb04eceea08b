"""Matrices of quantised blocks as they lie in a GGUF, and their reference dequantisation.

Owns the meaning of the bytes only through the gguf package, whose ``gguf.quants`` is the published
reference for every type; kernels that compute on blocks are ``ops/impl/`` and are compared with this.
Legend: O rows (outputs, or tokens of an embedding), I values per row (inputs).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from troth.artifact.ggml_types import GgmlType

DEQUANTISABLE: Final = frozenset(
    {
        *(GgmlType.F32, GgmlType.F16, GgmlType.BF16),
        *(GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q8_0),
        *(GgmlType.Q2_K, GgmlType.Q3_K, GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K),
        *(GgmlType.IQ1_S, GgmlType.IQ1_M, GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ2_S),
        *(GgmlType.IQ3_XXS, GgmlType.IQ3_S, GgmlType.IQ4_NL, GgmlType.IQ4_XS),
        *(GgmlType.TQ1_0, GgmlType.TQ2_0, GgmlType.MXFP4, GgmlType.NVFP4),
    }
)
"""Types the gguf package can turn into numbers; a test compares."""

# Values per chunk: float32 output and the reference's integer intermediates stay around 50 MB, however
# large the matrix.
_CHUNK_VALUES: Final = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A matrix of quantised rows. Owns nothing: ``raw`` is usually a view of the mapped file."""

    ggml_type: GgmlType
    """One of DEQUANTISABLE."""
    shape: tuple[int, int]
    """(O, I) in values."""
    raw: Tensor = field(repr=False)
    """uint8 [O, bytes per row], contiguous rows of whole blocks."""
    inputs: torch.dtype | None = None
    """int8: its inputs are rounded to 8 bits in groups of 32 (``ops/linear.py``); None: as the provider does."""

    def __post_init__(self) -> None:
        num_rows, num_values = self.shape
        expected = (num_rows, self.ggml_type.row_bytes(num_values))
        assert self.ggml_type in DEQUANTISABLE, self.ggml_type
        assert self.raw.dtype == torch.uint8, self.raw.dtype
        assert self.raw.shape == expected, (self.raw.shape, expected)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""
        return self.raw.numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor ``dtype`` [O, I] on the device of ``raw``, computed in float32 and rounded once."""
        return _dequantize(self.raw, self.ggml_type, self.shape[1], dtype)

    def rows(self, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows: ``index`` int64 [...] gives ``dtype`` [..., I]. Raises IndexError outside -O..O-1."""
        picked = self.raw[index.reshape(-1)]
        num_values = self.shape[1]
        return _dequantize(picked, self.ggml_type, num_values, dtype).reshape(*index.shape, num_values)

    def reordered(self, index: Tensor) -> QuantTensor:
        """The same matrix with row ``index[o]`` (int64 [O]) as row o. Copies the blocks."""
        return replace(self, raw=self.raw.index_select(0, index))


def _dequantize(raw: Tensor, ggml_type: GgmlType, num_values: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty((raw.shape[0], num_values), dtype=dtype, device=raw.device)
    chunk = max(1, _CHUNK_VALUES // num_values)
    for first in range(0, raw.shape[0], chunk):
        blocks = raw[first : first + chunk].cpu().numpy()
        # Damaged scales overflow; the values are what they are, and a library does not warn about them.
        with np.errstate(all="ignore"):
            values = dequantize(blocks, GGMLQuantizationType(ggml_type))
        out[first : first + chunk].copy_(torch.from_numpy(values))
    return out
