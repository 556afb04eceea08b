"""Head split, norm, rotation and cache write with few PyTorch calls: queries and keys are rotated together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from troth.ops.layer_kv import LayerKV
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write


@rotary_kv_write.provider("torch")
def rotary_kv_write_torch(
    qkv_TE: Tensor,
    num_heads: int,
    positions_T: Tensor,
    rotary: RotaryTable,
    norms: HeadNorms | None,
    slots_T: Tensor,
    kv: LayerKV,
) -> Tensor:
    """As ops.rotary_kv_write."""
    num_kv_heads, head_dim = kv.k_NKDS.shape[1], kv.k_NKDS.shape[2]
    num_tokens, rotated = qkv_TE.shape[0], num_heads + num_kv_heads
    heads = qkv_TE.view(num_tokens, rotated + num_kv_heads, head_dim)
    qk = heads[:, :rotated].float()
    if norms is not None:
        qk = F.rms_norm(qk, (head_dim,), None, norms.eps)
        qk[:, :num_heads] *= norms.q_D
        qk[:, num_heads:] *= norms.k_D
    width = rotary.cos_PW.shape[1]
    cos, sin = rotary.cos_PW[positions_T].unsqueeze(1), rotary.sin_PW[positions_T].unsqueeze(1)
    first, second = qk[..., :width], qk[..., width : 2 * width]
    turned = torch.empty_like(qk)
    torch.sub(first * cos, second * sin, out=turned[..., :width])
    torch.add(second * cos, first * sin, out=turned[..., width : 2 * width])
    if 2 * width < head_dim:
        turned[..., 2 * width :] = qk[..., 2 * width :]
    kv.write(slots_T, turned[:, num_heads:], heads[:, rotated:])
    return turned[:, :num_heads].to(qkv_TE.dtype)
