"""The kernels that a load launches first, compiled side by side before it launches any.

A load would otherwise wait for one after the other: most of a machine's first start (docs/log.md). What this misses is
compiled when it is launched, as ever. Refuses to know kernels: it goes through steps, those of ``step_cost.py`` and
``warmup.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

import torch

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import CacheSpec, attention_groups
from troth.contracts.names import BLOCK_TOKENS, BlockId, RequestId, Row
from troth.contracts.plan import BlockUpdate, StepPlan
from troth.contracts.progress import LoadProgress
from troth.errors import OutOfMemory
from troth.models.family import Model
from troth.ops.all_finite import all_finite
from troth.ops.sample import draws_of, sample
from troth.run.device_batch import DeviceBatches
from troth.run.graphs import DRAFT_WIDTHS
from troth.run.lone_prompt import LonePrompt
from troth.run.rehearsal import CHUNK_TOKENS, PaddingSteps, Step, chunk_step
from troth.run.warmup import WARM_UP_REQUESTS

MOST_ROWS: Final = len(WARM_UP_REQUESTS)
"""That a load's steps have."""
LONGEST_WARM_UP: Final = max(num_tokens for num_tokens, _ in WARM_UP_REQUESTS)
SHORT_TOKENS: Final = max(DRAFT_WIDTHS)
"""Of a first prompt that attention takes for an answer with drafts."""
CHUNKS: Final = (16, 32, 64, 256)
"""Tokens; products of more are others'."""
LOOK_S: Final = 0.1
"""How often progress is told."""


class FirstLaunches:
    """Launches every kernel that the first steps of an engine launch, over caches that are thrown away.

    Args:
        model: on ``device``.
        specs: its caches.
        max_rows: of the engine.
        context_tokens: longest request.
        step_tokens: most that a step feeds.
        dtype: of activations.
        kv_dtype: of keys and values.
        device: where providers choose what to launch by shapes alone.
    """

    def __init__(
        self,
        model: Model,
        specs: tuple[CacheSpec, ...],
        *,
        max_rows: int,
        context_tokens: int,
        step_tokens: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._specs = specs
        self._rows = min(max_rows, MOST_ROWS)
        self._context_tokens = context_tokens
        self._prompt_tokens = min(step_tokens, context_tokens)
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._device = device

    def __iter__(self) -> Iterator[Callable[[], object]]:
        """Parts to be called in inference mode, each with kernels of its own. They raise OutOfMemory, or PyTorch's own
        error of that, where the device has no room.
        """
        tokens, kv_dtype, device = self._prompt_tokens, self._kv_dtype, self._device
        yield LonePrompt(self._model, self._specs, [0] * tokens, kv_dtype=kv_dtype, device=device).hidden
        groups = attention_groups(self._specs)
        cache = CacheStorage(self._specs, (1,) * len(groups), self._rows, dtype=kv_dtype, device=device)
        padding = PaddingSteps(
            self._model,
            cache,
            groups,
            max_rows=self._rows,
            context_tokens=self._context_tokens,
            dtype=self._dtype,
            device=device,
        )
        for step in _first_steps(self._rows, padding.widths[0]):
            yield partial(padding.forward, step)
            yield partial(padding.logits, step.tokens)
        if self._rows > 1 and self._context_tokens > CHUNK_TOKENS:
            batches = DeviceBatches(groups, self._rows, self._context_tokens, device)
            beside = _prompt_beside_answer(len(groups), min(LONGEST_WARM_UP, self._context_tokens - 1))
            batches.follow(beside)
            yield lambda: self._model.forward(batches.build(beside), cache)
        logits_RV = torch.zeros(1, self._model.config.vocab_size, dtype=torch.float32, device=device)
        yield partial(all_finite, logits_RV)
        for _, sampling in WARM_UP_REQUESTS:
            yield partial(sample, logits_RV, draws_of([sampling], [0], device))


def _first_steps(max_rows: int, blocks: int) -> Iterator[Step]:
    """Answers of a few rows; a short prompt; chunks of as many tokens as change products; one behind a long context."""
    for rows in sorted({1, max_rows}):
        yield Step(rows, rows, 1, blocks)
    yield Step(1, SHORT_TOKENS, SHORT_TOKENS, blocks)
    for tokens in CHUNKS:
        yield Step(1, tokens, CHUNK_TOKENS, blocks)
    yield chunk_step(blocks)


def _prompt_beside_answer(num_groups: int, context_tokens: int) -> StepPlan:
    """A prompt's first tokens beside the next one of an answer behind such a context, all in one block."""
    plan = StepPlan(
        0,
        rows=[Row(0), Row(1)],
        request_ids=[RequestId("answer"), RequestId("prompt")],
        starts=[context_tokens, 0],
        num_new=[1, CHUNK_TOKENS],
        num_draft=[0, 0],
        sample_steps=[0, 0],
        token_ids=[0] * (1 + CHUNK_TOKENS),
        num_decodes=1,
    )
    block_ids = [BlockId(0)] * (context_tokens // BLOCK_TOKENS + 1)
    plan.block_updates = [BlockUpdate(row, group, 0, block_ids) for row in plan.rows for group in range(num_groups)]
    return plan


def compile_first(launches: Iterable[Callable[[], object]], progress: LoadProgress) -> None:
    """Compile, or load from where Triton keeps them, what ``launches`` are of, and launch none of it.

    Args:
        launches: of the model that is about to be measured.
        progress: told how many kernels are done.
    """
    from troth.ops.impl.triton_ahead import CompileAhead

    has_room = True
    with CompileAhead() as ahead:
        try:
            for launch in launches:
                with torch.inference_mode(), ahead.noting():
                    launch()
        except (torch.OutOfMemoryError, OutOfMemory):
            # The step that is measured next says it to whoever asked for this engine.
            has_room = False
        if not has_room:
            # Here, where nothing holds what the step had got.
            torch.cuda.empty_cache()
        is_done = False
        while not is_done:
            is_done = ahead.wait(LOOK_S)
            progress("compiling kernels", ahead.num_done, max(1, ahead.num_noted))
