"""Between host and device: what is sent without waiting, and a step's drawn tokens on their way back.

The copy is queued behind the step and read when somebody needs it, so that the host can launch the next step first.
Legend: S sampled positions.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

NOT_FINITE: Final = -1
"""Stands for the token of a position whose logits were not finite."""


class DrawnTokens(Protocol):
    """What a step drew, on its way to the host."""

    @property
    def is_here(self) -> bool:
        """Whether reading waits for nothing."""

    def tokens(self) -> list[int]:
        """The tokens of its draws, or NOT_FINITE; waits for them."""


class Readback:
    """Tokens of one step, readable from any thread.

    Args:
        token_S: int64 [S], on the device.
        finite_S: bool [S], on the device: whether the logits were finite.
    """

    def __init__(self, token_S: Tensor, finite_S: Tensor) -> None:
        packed_S = torch.where(finite_S, token_S, NOT_FINITE)
        self._event: torch.cuda.Event | None = None
        self._host_S = packed_S
        if packed_S.device.type == "cuda":
            self._host_S = torch.empty(packed_S.shape, dtype=packed_S.dtype, pin_memory=True)
            self._host_S.copy_(packed_S, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether reading waits for nothing."""
        return self._event is None or self._event.query()

    def tokens(self) -> list[int]:
        """The tokens, or NOT_FINITE; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._host_S.tolist()
        return tokens


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device. The host does not wait for the copy, and may forget the tensor."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
