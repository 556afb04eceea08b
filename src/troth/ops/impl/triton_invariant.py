"""The provider ``invariant``: ops whose result for a token is the same bits, whatever else its step computes.

Products, attention and head norms are the ops in which sums could run otherwise for other company; the rest of a step
computes each token by itself already. Not active unless asked for (``EngineOptions.deterministic``): long prompts cost
more, and so do quantised weights, which become numbers anew in each step. Next: ``triton_product.py``,
``triton_attention_ordered.py``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from troth.ops.attention import attention
from troth.ops.impl.torch_linear import DenseLinearWeight
from troth.ops.impl.triton import takes
from troth.ops.impl.triton_attention import takes_attention
from troth.ops.impl.triton_attention_ordered import attend_ordered
from troth.ops.impl.triton_groups import GroupLinearWeight, rows_of_groups
from troth.ops.impl.triton_product import ordered_product
from troth.ops.impl.triton_rotary import CHUNK_TOKENS, rotate_and_write, takes_rotary
from troth.ops.layer_kv import LayerKV
from troth.ops.linear import linear
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write
from troth.ops.rows import Rows


def _takes_linear(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> bool:
    if not takes(x_TI) or x_TI.stride(-1) != 1:
        return False
    if type(weight) is DenseLinearWeight:
        return weight.weight_OI.dtype == x_TI.dtype
    return type(weight) is GroupLinearWeight


@linear.provider("invariant", supports=_takes_linear)
def linear_invariant(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> Tensor:
    """As ops.linear."""
    if type(weight) is GroupLinearWeight:
        return ordered_product(x_TI, rows_of_groups(weight, None, x_TI.dtype, 1.0), bias_O)
    return ordered_product(x_TI, weight.weight_OI, bias_O)


def _takes_attention(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> bool:
    return kv.k_scale_NKS is None and takes_attention(q_THD, kv, block_table_RB, rows, scale, window, softcap)


@attention.provider("invariant", supports=_takes_attention)
def attention_invariant(
    q_THD: Tensor,
    kv: LayerKV,
    block_table_RB: Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As ops.attention; a row of context 0 gives zeros, table entries below 0 are never followed."""
    return attend_ordered(q_THD, kv, block_table_RB, rows, scale, window, softcap)


@rotary_kv_write.provider("invariant", supports=takes_rotary)
def rotary_kv_write_invariant(
    qkv_TE: Tensor,
    num_heads: int,
    positions_T: Tensor,
    rotary: RotaryTable,
    norms: HeadNorms | None,
    slots_T: Tensor,
    kv: LayerKV,
) -> Tensor:
    """As ops.rotary_kv_write; tokens whose slot is negative are not stored."""
    return rotate_and_write(qkv_TE, num_heads, positions_T, rotary, norms, slots_T, kv, CHUNK_TOKENS)
