"""Decode steps that the device replays: one capture per number of rows and width of the block tables.

A replay costs the host one call, whatever the model's depth. Rows are padded up to the next captured number; the
padding writes nowhere and reads nothing. What a capture leaves out would go unnoticed, so each is proved when it is
made: its logits are spoilt, it is replayed, and they must come out as from the ordinary step. Recurrent states are put
back in between (``cache/row_states.py``).
Legend: R rows, padding included, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from troth.cache.row_states import RowStates
from troth.cache.storage import CacheStorage
from troth.contracts.names import BLOCK_TOKENS
from troth.contracts.plan import StepPlan
from troth.models.family import Model
from troth.run.device_batch import DecodeInputs, DeviceBatches
from troth.run.recorded import Record

_log = logging.getLogger("troth")

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Runs a function once and gives back how to run it again, and its result, overwritten each time."""

FEW_ROWS: Final = (1, 2, 4, 8)
ROWS_APART: Final = 16
"""Numbers of rows that are captured: a few small ones, then multiples of this."""
FIRST_WIDTH_BLOCKS: Final = 64
"""The narrowest tables that are captured; each wider one is four times as wide. Attention visits every part of a table,
if only to find it unused."""


@dataclass(slots=True)
class _Captured:
    inputs: DecodeInputs
    replay: Callable[[], None]
    logits_RV: Tensor
    hidden_RD: Tensor


class DecodeGraphs:
    """Owns the captures of one model.

    Args:
        model: computes the steps.
        cache: its caches.
        batches: fills the inputs.
        capture: makes captures; ``cuda_capture`` on a GPU.
        max_rows: of the persistent batch.
        context_tokens: longest request.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheStorage,
        batches: DeviceBatches,
        capture: Capture,
        *,
        max_rows: int,
        context_tokens: int,
    ) -> None:
        self._model = model
        self._cache = cache
        self._batches = batches
        self._capture = capture
        self._row_counts = row_counts(max_rows)
        self._widths = table_widths(-(-context_tokens // BLOCK_TOKENS))
        self._captured: dict[tuple[int, int], _Captured] = {}
        self.record: Record | None = None
        self.hidden_TD: Tensor | None = None
        """Final hidden states of every token of the step that was computed last; overwritten like its logits."""
        self.refusal: str | None = None
        """Why steps are not captured; None while they are."""

    def logits(self, plan: StepPlan) -> Tensor | None:
        """float32 [sampled rows, V] of a followed plan of decodes alone; None for any other plan, or when refused.

        The tensor is overwritten by the next step.
        """
        count = len(plan.rows)
        if self.refusal is not None or plan.num_decodes != count or plan.num_tokens != count:
            return None
        num_blocks = -(-(max(plan.starts) + 1) // BLOCK_TOKENS)
        rows = self._row_counts[bisect_left(self._row_counts, count)]
        width = self._widths[bisect_left(self._widths, num_blocks)]
        captured = self._captured.get((rows, width))
        if captured is None:
            captured = self._make(plan, rows, width)
        else:
            self._batches.fill(captured.inputs, plan)
            captured.replay()
        self.hidden_TD = captured.hidden_RD[:count]
        return self._batches.sampled(captured.logits_RV)

    def _make(self, plan: StepPlan, rows: int, width: int) -> _Captured:
        """Compute a plan in the ordinary way, capture it and prove the capture."""
        began = time.monotonic()
        inputs = self._batches.decode_inputs(rows)
        self._batches.fill(inputs, plan)
        count, hidden_RD = len(plan.rows), torch.empty(0)

        def step() -> Tensor:
            nonlocal hidden_RD
            batch = self._batches.decode_batch(inputs, width)
            hidden_RD = self._model.forward(batch, self._cache)
            return self._model.logits(hidden_RD)

        before = RowStates(self._cache, plan.rows)
        ordinary_RV = step()[:count]
        ordinary_RD = hidden_RD[:count]
        after = RowStates(self._cache, plan.rows)
        before.put_back()
        replay, logits_RV = self._capture(step)
        # Both of the captured run: overwritten by every replay.
        captured = _Captured(inputs, replay, logits_RV, hidden_RD)
        logits_RV.fill_(torch.nan)
        replay()
        # The same kernels on the same numbers; room is left for libraries that sum in no fixed order.
        if torch.allclose(logits_RV[:count], ordinary_RV, rtol=1e-2, atol=1e-2, equal_nan=True):
            self._captured[rows, width] = captured
        else:
            self.refusal = "decode steps are not captured: a replay did not compute what the step did"
            logits_RV[:count], captured.hidden_RD[:count] = ordinary_RV, ordinary_RD
            after.put_back()
        _log.info(
            "captured decode of %d rows, contexts up to %d tokens: %.3f s",
            rows,
            width * BLOCK_TOKENS,
            time.monotonic() - began,
        )
        return captured


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


def cuda_capture() -> Capture:
    """Captures CUDA graphs that share one pool of memory: they run one after the other, never side by side."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Threads that make masks may wait for the device meanwhile; only this thread's calls are captured.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result

    return capture
