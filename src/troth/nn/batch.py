"""One step's batch as tensors, the only thing a model's forward gets besides the cache.

Legend: T tokens of all rows, R rows, B blocks per table, S positions whose logits are wanted. Built by
``run/batch.py``; read by ``models/`` and ``ops/``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from troth.ops.rows import Rows


@dataclass(slots=True)
class GroupTables:
    """Where the tokens of a step lie in one cache group."""

    block_table_RB: Tensor
    """int32 [R, B]: block ids by position / 16; -1 where nothing is held."""
    slots_T: Tensor
    """int64 [T]: block * 16 + offset of each fed token."""


@dataclass(slots=True)
class Batch:
    """Everything a forward pass needs to know about one step."""

    token_ids_T: Tensor
    """int64 [T]."""
    positions_T: Tensor
    """int64 [T]: position of each token in its own request."""
    rows: Rows
    groups: tuple[GroupTables, ...]
    """By cache group number (contracts.cache_spec.attention_groups)."""
    sample_S: Tensor
    """int64 [S]: indices into T of the positions whose logits are wanted."""

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.token_ids_T.device
