"""Steps of padding alone, computed while an engine has nothing else to do, so that no request waits for a compiler.

A kernel is compiled anew for some numbers of tokens and rows, and for some widths of rows and tables. These steps go
through all of them; the device finds nobody in them, and neither reads nor writes a cache.
Refuses to know kernels: it goes through the numbers at which they may change. Next: ``warmup.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS
from troth.models.family import Model
from troth.nn.batch import Batch
from troth.run.device_batch import DeviceBatches
from troth.run.graphs import DRAFT_WIDTHS, MOST_DRAFT_TOKENS, table_widths

_log = logging.getLogger("troth")

MOST_TOKENS: Final = 2048
"""Of a step: products change at powers of 2, the last time below it."""
ROWS_APART: Final = 4
"""From one number of rows to the next: attention changes at most once in a factor of 8."""
CHUNK_TOKENS: Final = 16
"""Of a prompt's chunk behind a long context."""
LONG_CONTEXT: Final = 4096
"""Tokens of such a context; attention of chunks changes once, below it."""


class Step(NamedTuple):
    """What is computed; nobody is in it."""

    rows: int
    tokens: int
    width: int
    """Most tokens of a row."""
    blocks: int
    """Of a table."""
    context: int = 0
    """Tokens that the host is told of the first row; the device knows better."""


def rehearsal(
    model: Model,
    cache: CacheStorage,
    groups: tuple[AttentionSpec, ...],
    *,
    max_rows: int,
    context_tokens: int,
    step_tokens: int,
    device: torch.device,
) -> Iterator[None]:
    """Have every kernel compiled that steps of a model launch, or loaded from where Triton keeps them, step by step.

    Args:
        model: on ``device``.
        cache: its caches; left as they are.
        groups: its attention groups.
        max_rows: of the persistent batch.
        context_tokens: longest request.
        step_tokens: most that a step feeds beside decodes.
        device: where all of this lies; providers choose there what to launch by shapes alone.
    """
    batches = DeviceBatches(groups, max_rows, context_tokens, device)
    widths = table_widths(-(-context_tokens // BLOCK_TOKENS))
    most_logits = max(max_rows, min(max(DRAFT_WIDTHS) * max_rows, MOST_DRAFT_TOKENS))
    for step in steps(max_rows, (widths[0], widths[-1]), step_tokens):
        inputs = batches.answer_inputs(step.rows, step.tokens, step.width)
        if step.context:
            inputs.starts[0], inputs.num_new[0] = max(0, min(step.context, context_tokens) - step.width), step.width
        if not _fits(model, cache, batches.answer_batch(inputs, step.blocks), most_logits):
            # Here, where nothing holds what the step had got.
            torch.cuda.empty_cache()
            _log.warning(
                "the device has no memory for a step of %d rows and %d tokens now; requests that come to need one end "
                "with OutOfMemory: lower max_rows or step_tokens, or free memory of the device",
                step.rows,
                step.tokens,
            )
        yield


def _fits(model: Model, cache: CacheStorage, batch: Batch, most_logits: int) -> bool:
    """Compute a step; False when the device has no memory for it."""
    try:
        with torch.inference_mode():
            model.logits(model.forward(batch, cache)[:most_logits])
    except torch.OutOfMemoryError:
        return False
    return True


def steps(max_rows: int, widths: tuple[int, int], step_tokens: int) -> Iterator[Step]:
    """Those that are computed.

    Args:
        max_rows: of the persistent batch.
        widths: blocks of the narrowest and of the widest tables.
        step_tokens: most that a step feeds beside decodes.
    """
    for blocks in sorted(set(widths)):
        rows = 1
        while rows < max_rows * ROWS_APART:
            for width in (1, *DRAFT_WIDTHS):
                yield Step(min(rows, max_rows), min(rows, max_rows), width, blocks)
            rows *= ROWS_APART
    tokens, most = 2, min(MOST_TOKENS, step_tokens + max_rows)
    while tokens < 2 * most:
        yield Step(1, min(tokens, most), max(DRAFT_WIDTHS), widths[0])
        tokens *= 2
    yield Step(1, CHUNK_TOKENS, CHUNK_TOKENS, widths[0], LONG_CONTEXT)
