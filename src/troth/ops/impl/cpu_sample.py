"""The end of a step by the C++ kernels: whether logits are finite, and which token each row draws."""

from __future__ import annotations

import torch
from torch import Tensor

from troth.ops.all_finite import all_finite
from troth.ops.impl import cpu
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
