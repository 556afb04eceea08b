"""The head with which a model drafts from its hidden states: one block over pairs of a token and the state before it.

Slot j of the head's keys and values holds the pair (hidden state of token j - 1, token j), so that a block of them is a
function of the same tokens as the model's own block. There is no pair 0. A pair that looks back has its key and value
in that place, too, in a block that is its row's own: so it sees pairs 1 to j, in an order that does not matter, as the
first j slots of its table. Built by the family files in ``models/``; ``run/head_drafts.py`` decides which pairs are
fed. Refuses to know rows and steps. Legend: T pairs, R rows, B blocks per table, D model width.
Reference: Gloeckle et al. 2024; DeepSeek-AI 2024 (V3), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.nn.linear import Linear
from troth.nn.mlp import FeedForward
from troth.ops.embedding import embedding
from troth.ops.linear import LinearWeight
from troth.ops.rms_norm import add_rms_norm, rms_norm
from troth.ops.rows import Rows


@dataclass(slots=True)
class Pairs:
    """Tokens, each with the hidden state of the token before it."""

    token_ids_T: Tensor
    """int64 [T]."""
    hidden_TD: Tensor
    """float [T, D]: of the tokens before, as ``Model.forward`` gives it, or as the head gave it for a draft."""
    positions_T: Tensor
    """int64 [T]: of the tokens before."""
    slots_T: Tensor
    """int64 [T]: where the pairs' keys and values go, in the head's cache group."""
    rows: Rows
    """Of pairs that do not look back, ``num_exact`` alone says anything."""


@dataclass(slots=True)
class LastPairs(Pairs):
    """One pair of each row that looks back; ``rows`` are steps of one token over as many tokens as there are pairs."""

    own_slots_R: Tensor
    """int64 [R]: the first slots of the rows' own blocks."""
    block_table_RB: Tensor
    """int32 [R, B] of the head's group, beginning with the rows' own blocks."""


class PairAttention(Protocol):
    """The head's attention."""

    layer: int
    """Its number in the caches."""

    def write(self, x_TD: Tensor, pairs: Pairs, cache: CacheStorage) -> None:
        """Keys and values of pairs, to their slots."""

    def look_back(self, x_RD: Tensor, pairs: LastPairs, cache: CacheStorage) -> Tensor:
        """Write the pairs' keys and values; float [R, D] of what each sees, itself included."""


@dataclass(slots=True, kw_only=True)
class DraftHead:
    """Holds weights, no state. Embedding and output layer are the model's own."""

    embedding: LinearWeight
    token_norm_D: Tensor
    hidden_norm_D: Tensor
    join_token: Linear
    """What the normalised token adds to the residual sum, D -> D..."""
    join_hidden: Linear
    """...and what the normalised hidden state does."""
    attention_norm_D: Tensor
    attention: PairAttention
    mlp_norm_D: Tensor
    mlp: FeedForward
    norm_D: Tensor
    eps: float
    """Of every norm."""
    dtype: torch.dtype
    """Of activations."""

    def prime(self, pairs: Pairs, cache: CacheStorage) -> None:
        """Write the pairs' keys and values: they follow from the pairs alone, whatever came before them."""
        self.attention.write(self._joined(pairs)[0], pairs, cache)

    def draft(self, pairs: LastPairs, cache: CacheStorage) -> Tensor:
        """Write the pairs' keys and values, and look on from each.

        Returns:
            float [R, D]: its logits by the model's output layer draft the token after the pair's; it is also the hidden
            state to pair that draft with.
        """
        x_RD, residual_RD = self._joined(pairs)
        x_RD = self.attention.look_back(x_RD, pairs, cache)
        x_RD, residual_RD = add_rms_norm(x_RD, residual_RD, self.mlp_norm_D, self.eps)
        return add_rms_norm(self.mlp(x_RD, pairs.rows), residual_RD, self.norm_D, self.eps)[0]

    def _joined(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """What attention is made of, and the residual sum, each [T, D]."""
        token_TD = rms_norm(embedding(pairs.token_ids_T, self.embedding, self.dtype), self.token_norm_D, self.eps)
        hidden_TD = rms_norm(pairs.hidden_TD, self.hidden_norm_D, self.eps)
        parts = self.join_token(token_TD, pairs.rows), self.join_hidden(hidden_TD, pairs.rows)
        return add_rms_norm(*parts, self.attention_norm_D, self.eps)
