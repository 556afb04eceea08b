"""The stack most families are: embedding, pre-norm blocks of attention and a feed-forward layer, final norm, output.

Refuses to know what kind of attention and of feed-forward layer a block has. Built by the family files in ``models/``.
Legend: T tokens, S sampled positions, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.nn.batch import Batch
from troth.nn.draft_head import DraftHead
from troth.nn.mlp import FeedForward
from troth.ops.embedding import embedding
from troth.ops.linear import LinearWeight, linear
from troth.ops.rms_norm import add_rms_norm, rms_norm


class Attention(Protocol):
    """Whatever lets the tokens of a row see those before them: softmax attention, linear attention."""

    def __call__(self, x_TD: Tensor, batch: Batch, cache: CacheStorage) -> Tensor:
        """float [T, D] -> float [T, D]; reads and writes the layer's cache."""


@dataclass(slots=True)
class Block:
    """x + attention(norm x), then + mlp(norm x)."""

    attention_norm_D: Tensor
    attention: Attention
    mlp_norm_D: Tensor
    mlp: FeedForward


@dataclass(slots=True, kw_only=True)
class Decoder:
    """A pre-norm decoder. Holds weights, no state."""

    embedding: LinearWeight
    blocks: Sequence[Block]
    norm_D: Tensor
    head: LinearWeight
    eps: float
    """Of every norm."""
    dtype: torch.dtype
    """Of activations."""
    draft_head: DraftHead | None = None
    """Drafts what follows; None: the model has none, or it was not loaded."""

    def forward(self, batch: Batch, cache: CacheStorage) -> Tensor:
        """As models.family.Model."""
        residual_TD = embedding(batch.token_ids_T, self.embedding, self.dtype)
        x_TD, rows = rms_norm(residual_TD, self.blocks[0].attention_norm_D, self.eps), batch.rows
        for i, block in enumerate(self.blocks):
            if i > 0:
                x_TD, residual_TD = add_rms_norm(x_TD, residual_TD, block.attention_norm_D, self.eps)
            x_TD = block.attention(x_TD, batch, cache)
            if block is self.blocks[-1]:
                x_TD, residual_TD, rows = batch.last_layer(x_TD, residual_TD)
            x_TD, residual_TD = add_rms_norm(x_TD, residual_TD, block.mlp_norm_D, self.eps)
            x_TD = block.mlp(x_TD, rows)
        return add_rms_norm(x_TD, residual_TD, self.norm_D, self.eps)[0]

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """As models.family.Model."""
        return linear(hidden_SD, self.head).float()
