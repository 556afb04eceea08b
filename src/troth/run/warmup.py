"""What an engine does before it takes requests on a GPU: it measures its largest step and answers a few requests of its
own, so that kernels are compiled and the commonest decodes captured before somebody waits for them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import torch

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import CacheSpec, attention_groups
from troth.contracts.events import Event, Failed
from troth.contracts.failures import error_from_event
from troth.contracts.names import BLOCK_TOKENS, BlockId, RequestId, Row
from troth.contracts.plan import BlockUpdate, StepPlan
from troth.contracts.ports import StepRunner
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.models.family import Model
from troth.run.device_batch import DeviceBatches
from troth.run.engine import EngineLoop
from troth.schedule.admission import SchedulerLimits
from troth.schedule.scheduler import Scheduler
from troth.text.detokenize import TokenBytes

WARM_UP_REQUESTS: Final[tuple[tuple[int, dict[str, float]], ...]] = (
    (1500, {"temperature": 0.0}),
    (40, {"temperature": 1.0}),
    (17, {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    (200, {"temperature": 0.0}),
)
"""Prompt tokens and draws of the requests that are answered first: alone, together, and prompts beside decodes."""
WARM_UP_TOKENS: Final = 24


@torch.inference_mode()
def measure_transient_bytes(
    model: Model,
    specs: tuple[CacheSpec, ...],
    *,
    step_tokens: int,
    max_rows: int,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> int:
    """Most bytes of device memory that one step takes for a while.

    Args:
        model: on ``device``.
        specs: its caches.
        step_tokens: most tokens of a step, fed as one prompt.
        max_rows: rows whose logits are wanted at once.
        kv_dtype: of keys and values.
        device: a CUDA device.

    Raises:
        OutOfMemory: the device holds the weights, but no step.
    """
    groups = attention_groups(specs)
    num_blocks = -(-step_tokens // BLOCK_TOKENS)
    cache = CacheStorage(specs, (num_blocks,) * len(groups), 1, dtype=kv_dtype, device=device)
    batches = DeviceBatches(groups, 1, step_tokens, device)
    plan = StepPlan(0, [Row(0)], [RequestId("warm-up")], [0], [step_tokens], [0], [0], [0] * step_tokens)
    plan.block_updates = [
        BlockUpdate(Row(0), group, 0, [BlockId(i) for i in range(num_blocks)]) for group in range(len(groups))
    ]
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    batches.follow(plan)
    hidden_TD = model.forward(batches.build(plan), cache)
    # Scores before and after they are scaled and their noise, as a draw holds them.
    logits_SV = model.logits(hidden_TD[:max_rows])
    _ = logits_SV + torch.rand_like(logits_SV)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


class _NoConsumer:
    """A consumer of answers that nobody wants; notes what went wrong."""

    last_read = 0.0

    def __init__(self) -> None:
        self.failed: Failed | None = None

    def offer(self, event: Event) -> bool:
        """As run.engine.Sink."""
        if isinstance(event, Failed):
            self.failed = event
        return True


def warm_up(runner: StepRunner, limits: SchedulerLimits, tokenizer: TokenBytes, depth: int) -> None:
    """Answer a few requests on a runner that has not answered any, through a scheduler of their own.

    Args:
        runner: from now on as fresh as before: every row and block is written anew by whoever gets it next.
        limits: of the engine.
        tokenizer: of the model.
        depth: the engine's pipeline depth.

    Raises:
        TrothError: what ended one of them; the engine would answer nobody.
    """
    scheduler = Scheduler(replace(limits, prompt_cache=False, max_waiting=len(WARM_UP_REQUESTS)))
    loop = EngineLoop(scheduler, runner, tokenizer, clock=time.monotonic, pipeline_depth=depth)
    audience = _NoConsumer()
    # An engine may have room for two tokens and no more.
    num_tokens = max(1, min(WARM_UP_TOKENS, limits.largest_request - 1))
    for number, (num_prompt, sampling) in enumerate(WARM_UP_REQUESTS):
        request = Request(
            request_id=RequestId(f"warm-up-{number}"),
            prompt_ids=(0,) * max(1, min(num_prompt, limits.largest_request - num_tokens)),
            max_tokens=num_tokens,
            sampling=SamplingParams(seed=number, **sampling),  # type: ignore[arg-type]
        )
        loop.add(request, audience)
        # The next one comes while this one decodes: its prompt is computed beside decodes.
        loop.step()
        loop.step()
    while loop.step():
        pass
    if audience.failed is not None:
        raise error_from_event(audience.failed)
