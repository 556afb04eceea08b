"""For tests of the disk tier: blocks whose content follows from their names, and a tier for an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from troth.cache.checkpoints import CheckpointStorage
from troth.cache.disk_names import block_names, cache_namespace
from troth.cache.disk_tier import DiskTier, Span
from troth.cache.host_copies import HostCopies
from troth.cache.storage import CacheStorage
from troth.run.disk_cache import DiskCache
from troth.schedule.scheduler import Scheduler

NAMESPACE = cache_namespace(artifact="a", dtype="float32", kv_dtype="float32", compute="cpu")
QUOTA = 200_000


def chain(number: int, num_blocks: int = 8) -> list[bytes]:
    """Names of one text's blocks."""
    return block_names(NAMESPACE, "", [(number * 977 + i) % 5000 for i in range(16 * num_blocks)])


def tensors_of(names: Sequence[bytes]) -> dict[str, Tensor]:
    """What two layers keep of some blocks."""
    rows = torch.tensor([list(name) for name in names], dtype=torch.float32)
    return {"0.k": rows.repeat(1, 16), "0.v": rows.repeat(1, 16) + 1}


def check_spans(names: Sequence[bytes], spans: Sequence[Span]) -> int:
    """How many blocks came back, each of them right."""
    count = 0
    for span in spans:
        assert span.first == count, "a gap"
        wanted = tensors_of(names[count : count + span.count])
        assert span.tensors.keys() == wanted.keys()
        assert all(torch.equal(span.tensors[key], wanted[key]) for key in wanted), "a wrong block"
        count += span.count
    return count


def disk_cache(
    folder: Path,
    scheduler: Scheduler,
    cache: CacheStorage,
    checkpoints: CheckpointStorage | None,
    namespace: str = NAMESPACE,
    quota_bytes: int = 10**9,
    finish_started: Callable[[], None] | None = None,
) -> DiskCache:
    """A disk tier connected to an engine's caches."""
    tier = DiskTier(folder, namespace, quota_bytes=quota_bytes)
    return DiskCache(scheduler, tier, HostCopies(cache, checkpoints, finish_started), time.monotonic)
