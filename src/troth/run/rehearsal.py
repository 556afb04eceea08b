"""Steps of padding alone, through which an engine goes so that no request waits for a compiler.

A kernel is compiled anew for some numbers of tokens and rows, and for some widths of rows and tables. A load compiles
what its own first steps launch (``first_kernels.py``), an idle engine all others. The device finds nobody in these
steps: it writes no cache, and what it makes of one is thrown away.
Refuses to know kernels: it goes through the numbers at which they may change. Next: ``warmup.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import BLOCK_TOKENS
from troth.models.family import Model
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
WHOLE_TOKENS: Final = 1024
"""Of the shortest prompt whose attention is computed whole."""
WHOLE_APART: Final = 256
"""From one length of those to the next: cuDNN makes a plan for each, in 33 ms and 1.3 MiB on an H200's host."""
PIECE_S: Final = 0.05
"""How long an idle engine waits for compilers before it looks at its inbox."""


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


class PaddingSteps:
    """Computes steps of padding.

    Args:
        model: on ``device``.
        cache: its caches; left as they are.
        groups: its attention groups.
        max_rows: of the persistent batch.
        context_tokens: longest request.
        dtype: of activations.
        device: where all of this lies; providers choose there what to launch by shapes alone.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheStorage,
        groups: tuple[AttentionSpec, ...],
        *,
        max_rows: int,
        context_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._cache = cache
        self._batches = DeviceBatches(groups, max_rows, context_tokens, device)
        self._context_tokens = context_tokens
        self._dtype = dtype
        self._device = device
        self._most_logits = max(max_rows, min(max(DRAFT_WIDTHS) * max_rows, MOST_DRAFT_TOKENS))
        self.widths = table_widths(-(-context_tokens // BLOCK_TOKENS))
        """Blocks of tables, ascending."""

    def fits(self, step: Step) -> bool:
        """Compute a step and its logits; False when the device has no memory for it."""
        try:
            with torch.inference_mode():
                hidden_TD = self.forward(step)
                self._model.logits(hidden_TD[: self._most_logits])
        except torch.OutOfMemoryError:
            return False
        return True

    def forward(self, step: Step) -> Tensor:
        """Final hidden states of a step, [T, D]; in inference mode."""
        inputs = self._batches.answer_inputs(step.rows, step.tokens, step.width)
        if step.context:
            start = max(0, min(step.context, self._context_tokens) - step.width)
            inputs.starts[0], inputs.num_new[0] = start, step.width
        return self._model.forward(self._batches.answer_batch(inputs, step.blocks), self._cache)

    def logits(self, num_tokens: int) -> Tensor:
        """Of so many positions, but no more than a step wants, [S, V]; in inference mode."""
        hidden_SD = torch.zeros(
            min(num_tokens, self._most_logits), self._model.config.hidden_size, dtype=self._dtype, device=self._device
        )
        return self._model.logits(hidden_SD)


def rehearsal(
    model: Model,
    cache: CacheStorage,
    groups: tuple[AttentionSpec, ...],
    *,
    max_rows: int,
    context_tokens: int,
    step_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[None]:
    """Have every kernel compiled that steps of a model launch, or loaded from where Triton keeps them, bit by bit.

    Args:
        model: as PaddingSteps, like those not named here.
        cache: its caches.
        groups: its attention groups.
        max_rows: of the persistent batch.
        context_tokens: longest request.
        step_tokens: most that a step feeds beside decodes.
        dtype: of activations.
        device: where all of this lies.
    """
    padding = PaddingSteps(
        model, cache, groups, max_rows=max_rows, context_tokens=context_tokens, dtype=dtype, device=device
    )
    every = tuple(steps(max_rows, (padding.widths[0], padding.widths[-1]), step_tokens))
    yield from _compiled(padding, every, device)
    for step in every:
        if not padding.fits(step):
            # Here, where nothing holds what the step had got.
            torch.cuda.empty_cache()
            _log.warning(
                "the device has no memory for a step of %d rows and %d tokens now; requests that come to need one end "
                "with OutOfMemory: lower max_rows or step_tokens, or free memory of the device",
                step.rows,
                step.tokens,
            )
        yield


def _compiled(padding: PaddingSteps, every: tuple[Step, ...], device: torch.device) -> Iterator[None]:
    """Compile what steps launch, side by side, while nothing is computed; the steps themselves then find it."""
    if device.type == "cpu":
        return
    from troth.ops.impl.triton_ahead import CompileAhead

    with CompileAhead() as ahead:
        for step in every:
            # Not across a yield: the engine's own launches are no notes.
            for launch in (padding.forward, lambda step: padding.logits(step.tokens)):
                try:
                    with torch.inference_mode(), ahead.noting():
                        launch(step)
                except torch.OutOfMemoryError:
                    break  # told when the step is computed
            yield
        while not ahead.wait(PIECE_S):
            yield


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
    yield chunk_step(widths[0])
    longest = min(MOST_TOKENS, step_tokens, widths[1] * BLOCK_TOKENS)
    for tokens in range(WHOLE_TOKENS, longest + WHOLE_APART, WHOLE_APART):
        length = min(tokens, longest)  # rounded up it has a plan, too
        if length >= WHOLE_TOKENS:
            yield Step(1, length, length, widths[1], length)


def chunk_step(blocks: int) -> Step:
    """A chunk of a long prompt, behind tables of so many blocks."""
    return Step(1, CHUNK_TOKENS, CHUNK_TOKENS, blocks, LONG_CONTEXT)
