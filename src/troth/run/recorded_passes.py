"""Passes of a proposer of drafts that run from recordings: one for each shape, and each proved when it is made.

As ``recorded.py`` does for the model's own steps, over inputs of any kind. Refuses to know what a pass computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from troth.run.recorded import Record, Recording

Inputs = TypeVar("Inputs")
MAX_SHAPES: Final = 64
"""Recordings that are kept."""


@dataclass(slots=True)
class _Recorded(Generic[Inputs]):
    inputs: Inputs
    recording: Recording
    computed: Sequence[Tensor]


class RecordedPasses(Generic[Inputs]):
    """Owns the recordings of one kind of pass.

    Args:
        compute: a pass, call by call.
        copied: the same inputs in tensors of their own.
        refill: writes inputs (the second) into others of the same shape.
        record: makes recordings; None: every pass is computed call by call.
    """

    def __init__(
        self,
        compute: Callable[[Inputs], Sequence[Tensor]],
        copied: Callable[[Inputs], Inputs],
        refill: Callable[[Inputs, Inputs], None],
        record: Record | None,
    ) -> None:
        self._compute = compute
        self._copied = copied
        self._refill = refill
        self._record = record
        self._recorded: dict[Hashable, _Recorded[Inputs]] = {}

    @property
    def records(self) -> bool:
        """Whether inputs should have one size for all contexts."""
        return self._record is not None

    def computed(self, shape: Hashable, inputs: Inputs) -> Sequence[Tensor]:
        """What a pass computes; overwritten by the next one of this shape, which may take it for input."""
        recorded = self._recorded.get(shape)
        if recorded is None:
            if self._record is None or len(self._recorded) >= MAX_SHAPES:
                return self._compute(inputs)
            return self._make(shape, inputs, self._record)
        self._refill(recorded.inputs, inputs)
        recorded.recording.run()
        return recorded.computed

    def _make(self, shape: Hashable, inputs: Inputs, record: Record) -> Sequence[Tensor]:
        """Compute a pass in the ordinary way, record it and prove the recording."""
        ordinary = [tensor.clone() for tensor in self._compute(inputs)]
        kept = self._copied(inputs)
        with record() as recording:
            again = self._compute(kept)
        recording.spoil()
        recording.run()
        if all(map(torch.equal, again, ordinary)):
            self._recorded[shape] = _Recorded(kept, recording, again)
        else:
            self._record = None  # it computes outside the recording ops: drafts are the slower for it
        return ordinary
