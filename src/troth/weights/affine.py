"""Matrices of codes in groups that share a scale and a minimum: weight = scale * code + minimum.

The numbers of MLX, AWQ and GPTQ files; their layouts become this form where such a file is read, which nothing does
yet. Kernels that compute on groups are ``ops/impl/`` and are compared with ``dequantize``.
Legend: O rows (outputs, or tokens of an embedding), I values per row (inputs), N groups per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

BITS: Final = (4, 8)
GROUP_VALUES: Final = (32, 64, 128)
_HALF: Final = 16
"""Codes of 4 bits share bytes with those this many further on, as in GGUF's Q4_1."""


@dataclass(frozen=True, slots=True, eq=False)
class AffineTensor:
    """A matrix of group-affine codes. Owns nothing: tensors are those of whoever read the file."""

    bits: int
    """Of a code, one of BITS."""
    codes_OI: Tensor = field(repr=False)
    """uint8 [O, I], below 2 ** bits."""
    scale_ON: Tensor = field(repr=False)
    """float32 [O, N]. Products with codes are exact where it has 16 significant bits, as float16 and bfloat16 do."""
    minimum_ON: Tensor = field(repr=False)
    """float32 [O, N]: what code 0 stands for. A zero point z is ``-scale * z``."""

    def __post_init__(self) -> None:
        outputs, inputs = self.codes_OI.shape
        assert self.bits in BITS, self.bits
        assert self.codes_OI.dtype == torch.uint8, self.codes_OI.dtype
        dtypes = self.scale_ON.dtype, self.minimum_ON.dtype
        assert dtypes == (torch.float32, torch.float32), dtypes
        assert self.scale_ON.shape == self.minimum_ON.shape, (self.scale_ON.shape, self.minimum_ON.shape)
        assert self.scale_ON.shape[0] == outputs, (self.scale_ON.shape, outputs)
        groups = self.scale_ON.shape[1]
        assert inputs in [groups * values for values in GROUP_VALUES], (inputs, groups)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.codes_OI.shape[0], self.codes_OI.shape[1]

    @property
    def group_values(self) -> int:
        """Values that share a scale."""
        return self.codes_OI.shape[1] // self.scale_ON.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes once packed; here codes of 4 bits take a byte each."""
        return self.codes_OI.numel() * self.bits // 8 + self.scale_ON.nbytes + self.minimum_ON.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor ``dtype`` [O, I] on the device of the codes, computed in float32 and rounded once."""
        codes_ONG = self.codes_OI.unflatten(1, (-1, self.group_values)).float()
        values_ONG = codes_ONG.mul_(self.scale_ON.unsqueeze(-1)).add_(self.minimum_ON.unsqueeze(-1))
        return values_ONG.flatten(1).to(dtype)

    def blocks(self) -> Tensor:
        """uint8 [O, bytes per row]: per group its scale, its minimum and its codes, 32 after 32.

        Codes of 4 bits lie two to a byte: a byte's low half and its high half are 16 values apart.
        """
        assert self.bits == 8 or not bool((self.codes_OI >> self.bits).any()), "a code has more bits than it may"
        codes = self.codes_OI.unflatten(1, (self.scale_ON.shape[1], -1, 2 * _HALF))
        if self.bits == 4:
            codes = codes[..., :_HALF] | codes[..., _HALF:] << 4
        header = torch.stack((self.scale_ON, self.minimum_ON), dim=-1).view(torch.uint8)
        return torch.cat((header, codes.flatten(2)), dim=-1).flatten(1)
