"""Decode steps that run from a recording: the same operations on the same buffers, refilled for each step.

A step in which every row feeds one output token is recorded once per number of rows; later ones cost Python a handful
of calls. What a recording leaves out (anything that is not an op of the recording provider) would go unnoticed, so each
is proved when it is made: its results are spoilt, it runs again, and its logits must equal those of the ordinary step.
Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.plan import NO_SAMPLE, StepPlan
from troth.models.family import Model
from troth.run.batch import BatchBuilder


class Recording(Protocol):
    """Operations that can run again."""

    def run(self) -> None:
        """Run them on what their buffers hold now."""

    def spoil(self) -> None:
        """Fill what they write with NaN."""


Record = Callable[[], AbstractContextManager[Recording]]


@dataclass(slots=True)
class _Recorded:
    refill: Callable[[StepPlan], None]
    recording: Recording
    logits_RV: Tensor


class RecordedDecode:
    """Owns the recordings of one model.

    Args:
        model: computes the step that is recorded.
        cache: its caches.
        batches: fills the buffers.
        record: makes a recording of what runs inside its context.
    """

    def __init__(self, model: Model, cache: CacheStorage, batches: BatchBuilder, record: Record) -> None:
        self._model = model
        self._cache = cache
        self._batches = batches
        self._record = record
        self._by_rows: dict[int, _Recorded] = {}
        # Making and proving a recording computes one step three times: harmless for keys and values, not for a state.
        self.refusal: str | None = "decode steps are not recorded: this model keeps recurrent state"
        """Why steps are not recorded; None while they are."""
        if not cache.states:
            self.refusal = None

    def logits(self, plan: StepPlan) -> Tensor | None:
        """float32 [R, V] of a followed plan whose rows are all decodes; None for any other plan, or when refused.

        The tensor is overwritten by the next step of as many rows.
        """
        rows = len(plan.rows)
        if self.refusal is not None or plan.num_decodes != rows or NO_SAMPLE in plan.sample_steps:
            return None
        recorded = self._by_rows.get(rows)
        if recorded is None:
            return self._make(plan)
        recorded.refill(plan)
        recorded.recording.run()
        return recorded.logits_RV

    def _make(self, plan: StepPlan) -> Tensor:
        batch = self._batches.build_whole(plan)
        ordinary_RV = self._model.logits(self._model.forward(batch, self._cache)).clone()
        with self._record() as recording:
            logits_RV = self._model.logits(self._model.forward(batch, self._cache))
        recording.spoil()
        recording.run()
        # The same operations in the same order: not close, equal.
        if torch.equal(logits_RV, ordinary_RV):
            self._by_rows[len(plan.rows)] = _Recorded(self._batches.refiller(batch), recording, logits_RV)
        else:
            self.refusal = "decode steps are not recorded: this model computes outside the recording ops"
        return ordinary_RV
