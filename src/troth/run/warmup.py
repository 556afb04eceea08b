"""What the largest step needs beside weights and caches, measured by running it once. It also compiles its kernels."""

from __future__ import annotations

import torch

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import CacheSpec, attention_groups
from troth.contracts.names import BLOCK_TOKENS, BlockId, RequestId, Row
from troth.contracts.plan import BlockUpdate, StepPlan
from troth.models.family import Model
from troth.run.device_batch import DeviceBatches


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
