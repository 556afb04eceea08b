"""Which way plans become tensors and decodes are computed on a device: recorded on the CPU, captured on a GPU.

Decided here once, when an engine starts. Next: ``recorded.py`` and ``graphs.py``.
"""

from __future__ import annotations

import torch

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import AttentionSpec
from troth.models.family import Model
from troth.ops.attention import attention
from troth.ops.impl import cpu
from troth.run.batch import BatchBuilder
from troth.run.capture import cuda_capture
from troth.run.device_batch import DeviceBatches
from troth.run.graphs import DecodeGraphs
from troth.run.recorded import RecordedDecode
from troth.run.runner import Batches, DecodeSteps
from troth.run.started import StartedDecode


def pipeline_depth(device: torch.device) -> int:
    """Steps launched before the oldest is read, beyond one: where it is computed while the host goes on, by a device or
    by other threads. The op providers are active already."""
    return 1 if device.type == "cuda" or _starts_steps(device) else 0


def _starts_steps(device: torch.device) -> bool:
    """Whether decode steps are left to the pool's workers: one thread alone is the host's."""
    return device.type == "cpu" and attention.active[:1] == ("cpu",) and torch.get_num_threads() > 1


def launches_by_shapes() -> bool:
    """Whether what a step launches depends on shapes alone; other providers look at lengths on the host, which a
    capture would freeze. The op providers are active already."""
    return attention.active[:1] in (("triton",), ("invariant",))


def step_builders(
    model: Model,
    cache: CacheStorage,
    groups: tuple[AttentionSpec, ...],
    *,
    max_rows: int,
    context_tokens: int,
    device: torch.device,
) -> tuple[Batches, DecodeSteps | None]:
    """What turns plans into tensors, and what computes decodes faster than call by call; None: nothing does.

    The op providers are active already.
    """
    if device.type == "cpu":
        host = BatchBuilder(groups, max_rows, context_tokens)
        is_recorded = attention.active[:1] == ("cpu",)
        return host, RecordedDecode(model, cache, host, cpu.recording) if is_recorded else None
    batches = DeviceBatches(groups, max_rows, context_tokens, device)
    captures = launches_by_shapes()
    graphs = DecodeGraphs(
        model,
        cache,
        batches,
        cuda_capture() if captures else None,
        max_rows=max_rows,
        context_tokens=context_tokens,
        refusal=None if captures else "decode steps are not captured: the op provider triton is not active",
    )
    return batches, graphs


def started_decode(batches: Batches, decodes: DecodeSteps | None, device: torch.device) -> StartedDecode | None:
    """What computes decode steps of ``step_builders`` while the host goes on, where no device does."""
    if not _starts_steps(device):
        return None
    assert isinstance(batches, BatchBuilder), batches
    assert isinstance(decodes, RecordedDecode), decodes
    return StartedDecode(decodes, batches)
