"""The end of a step by the C++ kernels: what grammars forbid, whether logits are finite, which token each row draws."""

from __future__ import annotations

import torch
from torch import Tensor

from troth.ops.all_finite import all_finite
from troth.ops.impl import cpu
from troth.ops.mask import mask
from troth.ops.sample import Draws, sample


def _takes_logits(logits_RV: Tensor, *_: object) -> bool:
    return logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32 and logits_RV.is_contiguous()


@sample.provider("cpu", supports=_takes_logits)
def sample_cpu(logits_RV: Tensor, draws: Draws) -> Tensor:
    """As ops.sample."""
    num_rows, vocab_size = logits_RV.shape
    token_R = torch.empty(num_rows, dtype=torch.int64)
    cpu.operations(logits_RV, draws, results=(token_R,)).sample(
        logits_RV.data_ptr(),
        num_rows,
        vocab_size,
        draws.temperature_R.data_ptr(),
        draws.top_k_R.data_ptr(),
        draws.top_p_R.data_ptr(),
        draws.min_p_R.data_ptr(),
        draws.xtc_probability_R.data_ptr(),
        draws.xtc_threshold_R.data_ptr(),
        draws.key_R.data_ptr(),
        token_R.data_ptr(),
    )
    return token_R


@all_finite.provider("cpu", supports=_takes_logits)
def all_finite_cpu(logits_RV: Tensor) -> Tensor:
    """As ops.all_finite."""
    num_rows, vocab_size = logits_RV.shape
    finite_R = torch.empty(num_rows, dtype=torch.bool)
    operations = cpu.operations(logits_RV, results=(finite_R,))
    operations.finite(logits_RV.data_ptr(), num_rows, vocab_size, finite_R.data_ptr())
    return finite_R


def _takes_masks(logits_RV: Tensor, row_G: Tensor, allowed_GW: Tensor) -> bool:
    return _takes_logits(logits_RV) and row_G.is_contiguous() and allowed_GW.is_contiguous()


@mask.provider("cpu", supports=_takes_masks)
def mask_cpu(logits_RV: Tensor, row_G: Tensor, allowed_GW: Tensor) -> None:
    """As ops.mask. Rows must be those of the logits: addresses are not checked."""
    operations = cpu.operations(logits_RV, row_G, allowed_GW, results=())
    operations.mask(
        logits_RV.data_ptr(), logits_RV.shape[1], row_G.data_ptr(), allowed_GW.data_ptr(), allowed_GW.shape[0]
    )
