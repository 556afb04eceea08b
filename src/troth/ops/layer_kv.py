"""One layer's share of its group's block pool: plain numbers, or int8 with a scale for each key and each value.

Owns the formats: how keys and values are rounded when they are written and what they mean when they are read. Refuses
to know whose blocks they are. Next: ``cache/storage.py``, which makes the tensors.

Legend: T tokens, N blocks of the pool, K key-value heads, D head size, S = 16 slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS

INT8_LARGEST: Final = 127
"""The format is symmetric: -128 is not used."""


@dataclass(slots=True)
class LayerKV:
    """Keys and values of one layer, written and read in place; the first dimension of every tensor is that of blocks.

    An int8 key (or value) of a token and head is q * scale with scale = max |x| / 127, so that no number moves by more
    than half a scale. Numbers that are not finite make the scale so: what was wrong stays visible.
    """

    k_NKDS: Tensor
    """Keys are stored transposed inside a block (docs/adr/0006)."""
    v_NKSD: Tensor
    k_scale_NKS: Tensor | None = None
    """float32; None: ``k_NKDS`` holds the numbers themselves."""
    v_scale_NKS: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All that is held, by field: the same fields in every layer of a cache."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def keys(self, blocks: Tensor) -> Tensor:
        """Keys of some blocks, ids [...]: [..., K, D, S], float32 where they are int8, else as they are held."""
        k = self.k_NKDS[blocks]
        return k if self.k_scale_NKS is None else k * self.k_scale_NKS[blocks].unsqueeze(-2)

    def values(self, blocks: Tensor) -> Tensor:
        """Values of some blocks, ids [...]: [..., K, S, D], as ``keys``."""
        v = self.v_NKSD[blocks]
        return v if self.v_scale_NKS is None else v * self.v_scale_NKS[blocks].unsqueeze(-1)

    def write(self, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys and values, float, at slots, int64: slot s of block n is 16 n + s."""
        block_T, offset_T = slots_T // BLOCK_TOKENS, slots_T % BLOCK_TOKENS
        if self.k_scale_NKS is not None and self.v_scale_NKS is not None:
            k_TKD, self.k_scale_NKS[block_T, :, offset_T] = _to_int8(k_TKD)
            v_TKD, self.v_scale_NKS[block_T, :, offset_T] = _to_int8(v_TKD)
        self.k_NKDS[block_T, :, :, offset_T] = k_TKD.to(self.k_NKDS.dtype)
        self.v_NKSD[block_T, :, offset_T] = v_TKD.to(self.v_NKSD.dtype)


def _to_int8(x_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """Integers [T, K, D] and their scales, float32 [T, K]."""
    x_TKD = x_TKD.float()
    scale_TK = x_TKD.abs().amax(dim=-1) / INT8_LARGEST
    usable_TK = scale_TK.isfinite() & (scale_TK > 0)
    steps_TKD = x_TKD / scale_TK.where(usable_TK, torch.ones_like(scale_TK)).unsqueeze(-1)
    return steps_TKD.round_().where(usable_TK.unsqueeze(-1), torch.zeros_like(steps_TKD)).to(torch.int8), scale_TK
