"""One step's batch as tensors, the only thing a model's forward gets besides the cache.

Legend: T tokens of all rows, R rows, B blocks per table, S positions whose logits are wanted. Built by
``run/batch.py``; read by ``models/`` and ``ops/``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
class Wanted:
    """The positions whose final hidden states anybody looks at, where those are not all."""

    index_S: Tensor
    """int64 [S]: indices into T, ascending."""
    num_exact: int
    """How many of them are among the first ``Rows.num_exact`` tokens."""


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
    wanted: Wanted | None = None
    """What ``Model.forward`` returns hidden states of; None: of every token."""

    def last_layer(self, x_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor, Rows]:
        """What goes on behind the last layer's attention: the wanted rows of its output and of the residual sum.

        A prompt's other tokens have left their keys and values by then, and nothing follows from them any more.
        """
        if self.wanted is None:
            return x_TD, residual_TD, self.rows
        index_S = self.wanted.index_S
        return x_TD[index_S], residual_TD[index_S], replace(self.rows, num_exact=self.wanted.num_exact)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.token_ids_T.device
