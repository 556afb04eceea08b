"""One layer's share of its group's block pool: plain numbers, or codes of 8 bits with a scale for each key and value.

Owns where keys and values lie and what they mean when they are read. Refuses to know whose blocks they are.
Next: ``codes.py``, and ``cache/storage.py``, which makes the tensors.

Legend: T tokens, N blocks of the pool, K key-value heads, D head size, S = 16 slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.codes import FP8, as_bytes, to_codes


@dataclass(slots=True)
class LayerKV:
    """Keys and values of one layer, written and read in place; the first dimension of every tensor is that of blocks.

    In a format of ``codes.py`` each key and each value of a token and head is a row with a scale of its own.
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
        """Keys of some blocks, ids [...]: [..., K, D, S], float32 where they are codes, else as they are held."""
        k = as_bytes(self.k_NKDS)[blocks].view(self.k_NKDS.dtype)
        return k if self.k_scale_NKS is None else k.float() * self.k_scale_NKS[blocks].unsqueeze(-2)

    def values(self, blocks: Tensor) -> Tensor:
        """Values of some blocks, ids [...]: [..., K, S, D], as ``keys``."""
        v = as_bytes(self.v_NKSD)[blocks].view(self.v_NKSD.dtype)
        return v if self.v_scale_NKS is None else v.float() * self.v_scale_NKS[blocks].unsqueeze(-1)

    def write(self, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys and values, float, at slots, int64: slot s of block n is 16 n + s."""
        block_T, offset_T = slots_T // BLOCK_TOKENS, slots_T % BLOCK_TOKENS
        if self.k_scale_NKS is not None and self.v_scale_NKS is not None:
            k_TKD, self.k_scale_NKS[block_T, :, offset_T] = to_codes(k_TKD, self.k_NKDS.dtype)
            v_TKD, self.v_scale_NKS[block_T, :, offset_T] = to_codes(v_TKD, self.v_NKSD.dtype)
        as_bytes(self.k_NKDS)[block_T, :, :, offset_T] = as_bytes(k_TKD.to(self.k_NKDS.dtype))
        as_bytes(self.v_NKSD)[block_T, :, offset_T] = as_bytes(v_TKD.to(self.v_NKSD.dtype))


def dtype_of(kv_dtype: str) -> torch.dtype:
    """The tensors' dtype of a cache format, by its name in options."""
    dtype: torch.dtype = FP8 if kv_dtype == "fp8" else getattr(torch, kv_dtype)
    return dtype
