"""The tensor types of GGML and how many bytes a block of each takes.

Owns sizes only; how the bits of a block become numbers is ``weights/quantized.py``. Values and sizes are
those of ggml's ``ggml_type`` and type traits; numbers ggml has retired (4, 5, 31-33, 36-38) are no types.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final


class GgmlType(IntEnum):
    """A tensor type by its number in a GGUF file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @property
    def block_size(self) -> int:
        """Values per block; rows of a tensor are whole blocks."""
        return GGML_BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return GGML_BLOCKS[self][1]

    def row_bytes(self, num_values: int) -> int:
        """Bytes of a row of ``num_values`` values, which must be a multiple of the block size."""
        assert num_values % self.block_size == 0, (self, num_values)
        return num_values // self.block_size * self.block_bytes


GGML_BLOCKS: Final[Mapping[GgmlType, tuple[int, int]]] = {
    # Plain numbers: a block is one value.
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.BF16: (1, 2),
    GgmlType.F64: (1, 8),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    # Blocks of 32: an F16 scale, with _1 an F16 minimum, then fifth bits, then nibbles or bytes.
    GgmlType.Q4_0: (32, 2 + 16),
    GgmlType.Q4_1: (32, 2 + 2 + 16),
    GgmlType.Q5_0: (32, 2 + 4 + 16),
    GgmlType.Q5_1: (32, 2 + 2 + 4 + 16),
    GgmlType.Q8_0: (32, 2 + 32),
    GgmlType.Q8_1: (32, 4 + 4 + 32),
    GgmlType.IQ4_NL: (32, 2 + 16),
    GgmlType.MXFP4: (32, 1 + 16),
    # Blocks of 64 and 128.
    GgmlType.NVFP4: (64, 4 + 32),
    GgmlType.Q1_0: (128, 2 + 16),
    # Super-blocks of 256: scales of scales, then packed values.
    GgmlType.Q2_K: (256, 2 + 2 + 16 + 64),
    GgmlType.Q3_K: (256, 2 + 12 + 32 + 64),
    GgmlType.Q4_K: (256, 2 + 2 + 12 + 128),
    GgmlType.Q5_K: (256, 2 + 2 + 12 + 32 + 128),
    GgmlType.Q6_K: (256, 2 + 16 + 64 + 128),
    GgmlType.Q8_K: (256, 4 + 256 + 32),
    GgmlType.IQ1_S: (256, 2 + 32 + 16),
    GgmlType.IQ1_M: (256, 32 + 16 + 8),
    GgmlType.IQ2_XXS: (256, 2 + 64),
    GgmlType.IQ2_XS: (256, 2 + 64 + 8),
    GgmlType.IQ2_S: (256, 2 + 64 + 16),
    GgmlType.IQ3_XXS: (256, 2 + 64 + 32),
    GgmlType.IQ3_S: (256, 2 + 64 + 32 + 8 + 4),
    GgmlType.IQ4_XS: (256, 2 + 2 + 128 + 4),
    GgmlType.TQ1_0: (256, 2 + 4 * 13),
    GgmlType.TQ2_0: (256, 2 + 64),
}
