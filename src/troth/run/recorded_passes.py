"""Passes of a proposer of drafts that are kept to run again: one for each shape, and each proved when it is made.

As ``recorded.py`` and ``graphs.py`` do for the model's own steps, over inputs of any kind. Refuses to know what a pass
computes, and how it is kept (``capture.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch

from troth.run.capture import Capture, Computed, near

Inputs = TypeVar("Inputs")
MAX_SHAPES: Final = 64
"""Passes that are kept."""


@dataclass(slots=True)
class _Recorded(Generic[Inputs]):
    inputs: Inputs
    run: Callable[[], None]
    computed: Computed


class RecordedPasses(Generic[Inputs]):
    """Owns what is kept of one kind of pass.

    Args:
        compute: a pass, call by call.
        copied: the same inputs in tensors of their own.
        refill: writes inputs (the second) into others of the same shape.
        capture: keeps passes to run again; None: every pass is computed call by call.
    """

    def __init__(
        self,
        compute: Callable[[Inputs], Computed],
        copied: Callable[[Inputs], Inputs],
        refill: Callable[[Inputs, Inputs], None],
        capture: Capture | None,
    ) -> None:
        self._compute = compute
        self._copied = copied
        self._refill = refill
        self._capture = capture
        self._recorded: dict[Hashable, _Recorded[Inputs]] = {}

    @property
    def records(self) -> bool:
        """Whether inputs should have one size for all contexts."""
        return self._capture is not None

    def computed(self, shape: Hashable, inputs: Inputs) -> Computed:
        """What a pass computes; overwritten by the next one of this shape, which may take it for input."""
        recorded = self._recorded.get(shape)
        if recorded is None:
            if self._capture is None or len(self._recorded) >= MAX_SHAPES:
                return self._compute(inputs)
            return self._make(shape, inputs, self._capture)
        self._refill(recorded.inputs, inputs)
        recorded.run()
        return recorded.computed

    def _make(self, shape: Hashable, inputs: Inputs, capture: Capture) -> Computed:
        """Compute a pass in the ordinary way, keep it and prove that it runs again."""
        ordinary = [tensor.clone() for tensor in self._compute(inputs)]
        kept = self._copied(inputs)
        run, again = capture(lambda: self._compute(kept))
        for tensor in again:
            tensor.fill_(torch.nan)
        run()
        if all(map(near, again, ordinary)):
            self._recorded[shape] = _Recorded(kept, run, again)
        else:
            self._capture = None  # it computes outside of what is kept: drafts are the slower for it
        return ordinary
