"""Passes of a proposer of drafts that are kept to run again: one for each shape, and each proved when it is made.

As ``recorded.py`` and ``graphs.py`` do for the model's own steps, over inputs of any kind. Refuses to know what a pass
computes, how it is kept (``capture.py``) and proved (``proved.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from troth.run.capture import Capture, Computed
from troth.run.proved import Kept, proved

Inputs = TypeVar("Inputs")
MAX_SHAPES: Final = 64
"""Passes that are kept."""


@dataclass(slots=True)
class _Recorded(Generic[Inputs]):
    inputs: Inputs
    kept: Kept


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
        recorded.kept.run()
        return recorded.kept.computed

    def _make(self, shape: Hashable, inputs: Inputs, capture: Capture) -> Computed:
        """Compute a pass in the ordinary way, keep it and prove that it runs again."""
        own = self._copied(inputs)
        ordinary, kept = proved(lambda: self._compute(own), capture)
        if kept is None:
            self._capture = None  # it computes outside of what is kept: drafts are the slower for it
        else:
            self._recorded[shape] = _Recorded(own, kept)
        return ordinary
