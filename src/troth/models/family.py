"""What every family module provides, and what it is built with.

A family module exports ``Config`` (a frozen dataclass with ``from_hf`` and, where files exist, ``from_gguf``),
``Model``, and ``IGNORED`` (patterns of tensors in the artifact that the family leaves alone on purpose).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.config.options import Inputs, Weights
from troth.contracts.cache_spec import CacheSpec
from troth.nn.batch import Batch
from troth.nn.draft_head import DraftHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and in what numbers a model computes."""

    device: torch.device
    dtype: torch.dtype
    """Of activations and of weights that are not quantised."""
    context_tokens: int
    """Longest request; sizes the rotary tables."""
    weights: Weights | None = None
    """What matrices of layers are rounded to; None: they stay as the artifact holds them."""
    inputs: Inputs | None = None
    """What quantised matrices of layers have their inputs rounded to; None: to whatever the provider does."""


class FamilyConfig(Protocol):
    """What the engine needs to know of any family's config."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def intermediate_size(self) -> int:
        """Width inside the feed-forward layers."""

    @property
    def max_position_embeddings(self) -> int:
        """Longest context the model was made for."""

    def cache_specs(self, element_bytes: int) -> tuple[CacheSpec, ...]:
        """The model's cache groups, with ``element_bytes`` per cached number."""


@runtime_checkable
class HeadConfig(Protocol):
    """What the config of a family whose checkpoints may hold a draft head has besides."""

    @property
    def draft_head_refusal(self) -> str | None:
        """Why the checkpoint's draft head cannot be loaded; None: it can."""

    def with_draft_head(self) -> FamilyConfig:
        """The same, with the draft head loaded and cached."""


class Model(Protocol):
    """A model ready to compute. Holds weights, no state."""

    @property
    def config(self) -> FamilyConfig:
        """Its configuration."""

    @property
    def draft_head(self) -> DraftHead | None:
        """Drafts what follows; None: the model has none, or it was not loaded."""

    def forward(self, batch: Batch, cache: CacheStorage) -> Tensor:
        """Final hidden states of every token, or of the wanted ones, float [T, D]; reads and writes the cache."""

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """float [S, D] -> float32 [S, V]."""
