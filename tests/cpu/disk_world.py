"""One engine with a disk tier, over a small model that was saved before: no more than a process needs to serve.

Without the reference implementation, whose import takes longer than a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests import laws
from tests.cpu.disk_blocks import NAMESPACE, disk_cache
from troth.artifact.resolve import resolve
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups, recurrent_bytes
from troth.contracts.names import RequestId
from troth.contracts.prefix_cache import DiskCacheStatus
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.models.family import Model, Placement
from troth.models.registry import recognise
from troth.run.batch import BatchBuilder
from troth.run.disk_cache import DiskCache
from troth.run.engine import EngineLoop
from troth.run.runner import ModelRunner
from troth.schedule.admission import SchedulerLimits
from troth.schedule.replay import RecordingScheduler, replay
from troth.testing.byte_tokenizer import ByteTokenizer

TOPOLOGIES = ("llama", "gemma3", "qwen3_5")
"""Full attention, sliding windows, recurrent state."""
CONTEXT = 256
VOCAB = 131
"""Of the models that ``tiny_models.py`` saves, or less."""
CPU = torch.device("cpu")


@dataclass
class World:
    """One engine with a disk tier, and the trace of its scheduler."""

    loop: EngineLoop
    scheduler: RecordingScheduler
    disk: DiskCache
    lines: list[str] = field(default_factory=list)

    @property
    def status(self) -> DiskCacheStatus:
        return self.disk.status()

    def serve(self, *requests: Request, stagger: int = 0) -> list[laws.Answer]:
        return laws.serve_on(self.loop, self.scheduler, requests, stagger=stagger)


def load(path: Path) -> Model:
    """The model saved at ``path``, in float32."""
    return recognise(resolve(path)).load(Placement(device=CPU, dtype=torch.float32, context_tokens=CONTEXT))


@contextmanager
def world(model: Model, folder: Path, *, namespace: str = NAMESPACE, **changes: Any) -> Iterator[World]:
    specs = model.config.cache_specs(4)
    groups = attention_groups(specs)
    values: dict[str, Any] = {"num_blocks": (200,) * len(groups), "max_rows": 4, "max_waiting": 64} | changes
    lines: list[str] = []
    num_checkpoints = None if recurrent_bytes(specs) is None else 32
    limits = SchedulerLimits(
        groups=groups,
        chunk_tokens=64,
        step_tokens=64,
        context_tokens=CONTEXT,
        prompt_cache=True,
        num_checkpoints=num_checkpoints,
        checkpoint_interval_tokens=32,
        **values,
    )
    cache = CacheStorage(specs, limits.num_blocks, limits.max_rows, dtype=torch.float32, device=CPU)
    scheduler = RecordingScheduler(limits, lines.append)
    checkpoints = CheckpointStorage(cache, num_checkpoints or 0)
    disk = disk_cache(folder, scheduler, cache, checkpoints, namespace)
    runner = ModelRunner(model, cache, BatchBuilder(groups, limits.max_rows, CONTEXT), checkpoints=checkpoints)
    loop = EngineLoop(scheduler, runner, ByteTokenizer(), clock=lambda: 0.0, disk=disk)
    try:
        yield World(loop, scheduler, disk, lines)
    finally:
        loop.close()
    assert replay(lines) == len(lines) - 1


def text(number: int = 0, num_tokens: int = 150, most: int = 12, name: str = "r") -> Request:
    return Request(
        request_id=RequestId(f"{name}{number}"),
        prompt_ids=tuple(Random(number).choices(range(VOCAB), k=num_tokens)),
        max_tokens=most,
        sampling=SamplingParams(temperature=0, logprobs=0),
        boundary=num_tokens - 3,
        checkpoint_positions=(40,),
    )
