"""Steps that only continue answers, replayed by the device: captured by rows, tokens and the width of tables.

A replay costs the host one call, whatever the model's depth. Rows, and all their tokens, are padded up to the next
captured numbers; the padding writes nowhere and reads nothing. Each capture is proved when it is made (``proved.py``).
Legend: T tokens, padding included, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, NamedTuple

from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.names import BLOCK_TOKENS
from troth.contracts.plan import StepPlan
from troth.models.family import Model
from troth.run.answer_inputs import AnswerInputs
from troth.run.capture import Capture, Computed, near
from troth.run.device_batch import DeviceBatches
from troth.run.proved import Kept, proved

_log = logging.getLogger("troth")

FEW_ROWS: Final = (1, 2, 4, 8)
ROWS_APART: Final = 16
"""Numbers of rows that are captured: a few small ones, then multiples of this."""
FIRST_WIDTH_BLOCKS: Final = 64
"""The narrowest tables that are captured; each wider one is four times as wide. Attention visits every part of a table,
if only to find it unused."""
DRAFT_WIDTHS: Final = (2, 4, 8)
"""Tokens of a row in a step with drafts, at most and on average: one more than those. Longer ones are not captured."""
MOST_DRAFTS: Final = max(DRAFT_WIDTHS) - 1
"""Of a row, where the request does not say how many. With one more, a tile of its queries would be twice as large, and
so would tiles of quantised products for a lone row."""
MOST_DRAFT_TOKENS: Final = 256
"""Tokens, padding included, of a captured step with drafts: of more, Python's share is small."""


class _Shape(NamedTuple):
    """What a capture is made for; padding included."""

    rows: int
    tokens: int
    width: int
    """Most tokens of a row."""
    blocks: int
    """Of a table."""


@dataclass(slots=True)
class _Captured:
    inputs: AnswerInputs
    kept: Kept


class DecodeGraphs:
    """Owns the captures of one model.

    Args:
        model: computes the steps.
        cache: its caches.
        batches: fills the inputs.
        capture: makes captures, of proposers' passes, too; ``cuda_capture`` on a GPU. None: nothing is captured.
        max_rows: of the persistent batch.
        context_tokens: longest request.
        refusal: why steps are not captured, in words; None: they are.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheStorage,
        batches: DeviceBatches,
        capture: Capture | None,
        *,
        max_rows: int,
        context_tokens: int,
        refusal: str | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._batches = batches
        self._row_counts = row_counts(max_rows)
        self._widths = table_widths(-(-context_tokens // BLOCK_TOKENS))
        self._captured: dict[_Shape, _Captured] = {}
        self.capture = capture
        self.hidden_TD: Tensor | None = None
        """Final hidden states of every token of the step that was computed last; overwritten like its logits."""
        self.refusal = refusal
        """Why steps are not captured; None while they are."""

    def logits(self, plan: StepPlan) -> Tensor | None:
        """float32 [S, V] of a followed plan whose rows all continue answers; None for any other plan, or when refused.

        The tensor is overwritten by the next step.
        """
        shape = self._shape(plan)
        if shape is None:
            return None
        captured = self._captured.get(shape)
        if captured is None:
            logits_TV, hidden_TD = self._make(plan, shape)
        else:
            self._batches.fill(captured.inputs, plan)
            captured.kept.run()
            logits_TV, hidden_TD = captured.kept.computed
        self.hidden_TD = hidden_TD[: plan.num_tokens]
        return self._batches.sampled(logits_TV)

    def _shape(self, plan: StepPlan) -> _Shape | None:
        """Of the capture for a plan; None: there is none."""
        count = len(plan.rows)
        if self.refusal is not None or plan.num_decodes + plan.num_verifies != count:
            return None
        rows = tokens = self._row_counts[bisect_left(self._row_counts, count)]
        width, last = 1, max(plan.starts)
        if plan.num_verifies:
            longest = max(plan.num_new)
            width = next((width for width in DRAFT_WIDTHS if width >= longest), 0)
            tokens = next((rows * each for each in DRAFT_WIDTHS if rows * each >= plan.num_tokens), 0)
            if not width or tokens > MOST_DRAFT_TOKENS:
                return None
            last = max(start + fed for start, fed in zip(plan.starts, plan.num_new, strict=True)) - 1
        return _Shape(rows, tokens, width, self._widths[bisect_left(self._widths, last // BLOCK_TOKENS + 1)])

    def _make(self, plan: StepPlan, shape: _Shape) -> Computed:
        """Compute a plan in the ordinary way, capture it and prove the capture."""
        began, capture = time.monotonic(), self.capture
        assert capture is not None
        inputs = self._batches.answer_inputs(shape.rows, shape.tokens, shape.width)
        self._batches.fill(inputs, plan)

        def step() -> Computed:
            hidden_TD = self._model.forward(self._batches.answer_batch(inputs, shape.blocks), self._cache)
            return self._model.logits(hidden_TD), hidden_TD

        def same(again: Computed, ordinary: Computed) -> bool:
            return near(again[0][: plan.num_tokens], ordinary[0][: plan.num_tokens])

        computed, kept = proved(step, capture, self._cache, plan.rows, same)
        if kept is None:
            self.refusal = "decode steps are not captured: a replay did not compute what the step did"
        else:
            self._captured[shape] = _Captured(inputs, kept)
        _log.info(
            "captured %d rows of %d tokens, contexts up to %d tokens: %.3f s",
            shape.rows,
            shape.tokens,
            shape.blocks * BLOCK_TOKENS,
            time.monotonic() - began,
        )
        return computed


def row_counts(max_rows: int) -> list[int]:
    """Numbers of rows that are captured, ascending, the last one ``max_rows``."""
    counts = [count for count in (*FEW_ROWS, *range(ROWS_APART, max_rows, ROWS_APART)) if count < max_rows]
    return [*counts, max_rows]


def table_widths(num_blocks: int) -> list[int]:
    """Widths of block tables that are captured, in blocks, ascending, the last one ``num_blocks``."""
    widths, width = [], FIRST_WIDTH_BLOCKS
    while width < num_blocks:
        widths.append(width)
        width *= 4
    return [*widths, num_blocks]
