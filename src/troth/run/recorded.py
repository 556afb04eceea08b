"""Decode steps that run from a recording: the same operations on the same buffers, refilled for each step.

A step in which every row feeds one output token is recorded once per number of rows, and one with drafts once per
numbers of drafts that come again; later ones cost Python a handful of calls. A recording leaves out what is no op of
the recording provider, so each is proved when it is made (``proved.py``).
Legend: R rows, T tokens, D model width, S sampled positions, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.plan import NO_SAMPLE, StepPlan
from troth.models.family import Model
from troth.ops.rows import Rows
from troth.run.batch import BatchBuilder
from troth.run.capture import Capture, Computed, Record, Recording, capture_by
from troth.run.proved import Kept, proved
from troth.run.step_inputs import StepInputs

SIGHTINGS: Final = 2
"""Steps with the same numbers of drafts after which they are recorded: making a recording takes three steps."""
MAX_VERIFIES: Final = 24
"""Recordings of steps with drafts, whose numbers may be any."""
MAX_VERIFY_TOKENS: Final = 32
"""Tokens of a step with drafts that is recorded: of more, Python's share is small."""


@dataclass(slots=True)
class Recorded:
    """One recording of decode steps."""

    refill: Callable[[StepPlan], None]
    """Writes a followed plan of the same form where it reads."""
    kept: Kept
    """Runs it, and has its results."""
    recording: Recording
    """The same operations, for whoever runs them in another way."""
    inputs: StepInputs | None
    """What it reads anew; None: rows feed several tokens, and its inputs lie here and there."""
    rows: Rows
    """Those of its batch."""


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
        self.capture: Capture | None = capture_by(record)
        self._by_rows: dict[int, Recorded] = {}
        self._by_widths: dict[tuple[int, ...], Recorded] = {}
        """Of steps with drafts, by the tokens of each row."""
        self._seen: Counter[tuple[int, ...]] = Counter()
        self.hidden_TD: Tensor | None = None
        """Final hidden states of every token of the step that was computed last; overwritten like its logits."""
        self.refusal: str | None = None
        """Why steps are not recorded; None while they are."""

    def logits(self, plan: StepPlan) -> Tensor | None:
        """float32 [S, V] of a followed plan whose rows all continue answers; None for any other plan, or when refused.

        The tensor is overwritten by the next step of as many tokens of each row.
        """
        rows = len(plan.rows)
        if self.refusal is not None or plan.num_decodes + plan.num_verifies != rows or NO_SAMPLE in plan.sample_steps:
            return None
        recorded = self._by_widths.get(tuple(plan.num_new)) if plan.num_verifies else self._by_rows.get(rows)
        if recorded is None:
            return None if plan.num_verifies and not self._comes_again(plan) else self._make(plan)
        recorded.refill(plan)
        recorded.kept.run()
        logits_RV, self.hidden_TD = recorded.kept.computed
        return logits_RV

    def _comes_again(self, plan: StepPlan) -> bool:
        """Whether a step with drafts is worth a recording."""
        if plan.num_tokens > MAX_VERIFY_TOKENS or len(self._by_widths) >= MAX_VERIFIES:
            return False
        widths = tuple(plan.num_new)
        self._seen[widths] += 1
        return self._seen[widths] >= SIGHTINGS

    def of_rows(self, num_rows: int) -> Recorded | None:
        """The recording of steps in which so many rows feed one token each, if there is one yet."""
        return self._by_rows.get(num_rows) if self.refusal is None else None

    def _make(self, plan: StepPlan) -> Tensor:
        inputs = None if plan.num_verifies else self._batches.new_inputs(len(plan.rows))
        batch = self._batches.build_whole(plan) if inputs is None else self._batches.build_over(inputs, plan)
        recordings: list[Recording] = []

        def step() -> Computed:
            hidden_TD = self._model.forward(batch, self._cache)
            return self._model.logits(hidden_TD), hidden_TD

        @contextmanager
        def record() -> Iterator[Recording]:
            with self._record() as recording:
                recordings.append(recording)
                yield recording

        (logits_RV, self.hidden_TD), kept = proved(step, capture_by(record), self._cache, plan.rows, _equal_logits)
        if kept is None:
            self.refusal = "decode steps are not recorded: this model computes outside the recording ops"
            return logits_RV
        if inputs is None:
            made = Recorded(self._batches.refiller(batch), kept, recordings[-1], None, batch.rows)
            self._by_widths[tuple(plan.num_new)] = made
        else:
            refill = partial(self._batches.refill_over, batch, inputs)
            self._by_rows[len(plan.rows)] = Recorded(refill, kept, recordings[-1], inputs, batch.rows)
        return logits_RV


def _equal_logits(again: Computed, ordinary: Computed) -> bool:
    """The same operations in the same order: not close, equal."""
    return torch.equal(again[0], ordinary[0])
