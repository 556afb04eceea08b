"""Blocks for tests of the disk tier: their content follows from their names, so any mistake shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from troth.cache.disk_names import block_names, cache_namespace

NAMESPACE = cache_namespace(artifact="a", dtype="float32", kv_dtype="float32")
QUOTA = 200_000


def chain(number: int, num_blocks: int = 8) -> list[bytes]:
    """Names of one text's blocks."""
    return block_names(NAMESPACE, "", [(number * 977 + i) % 5000 for i in range(16 * num_blocks)])


def tensors_of(names: Sequence[bytes]) -> dict[str, Tensor]:
    """What two layers keep of some blocks."""
    rows = torch.tensor([list(name) for name in names], dtype=torch.float32)
    return {"0.k": rows.repeat(1, 16), "0.v": rows.repeat(1, 16) + 1}
