"""Qwen3.5, text and dense: three layers of gated delta net for each layer of gated attention.

The image tower is left alone; the multi-token-prediction head drafts. What the family shares with Qwen's other hybrids
is in ``hybrid_config.py`` and ``hybrid_decoder.py``.
Reference: Qwen Team 2025; names as in transformers' Qwen3_5TextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from troth.models.hybrid_config import HybridConfig, qwen3_5_keys, text_config
from troth.models.hybrid_decoder import HybridModel

IGNORED: Final = ("mtp.*", "model.visual.*")
"""A draft head that is loaded is not ignored: ``models/registry.py`` leaves its pattern out then."""

Model = HybridModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(HybridConfig):
    """The numbers that define a model of this family."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read config.json of model_type qwen3_5_text, or the ``text_config`` in one of qwen3_5."""
        config = text_config(values, path)
        return cls.read(config, **qwen3_5_keys(config))
