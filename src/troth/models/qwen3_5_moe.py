"""Qwen3.5, text, with experts: the hybrid of ``qwen3_5.py`` with a choice of experts in every feed-forward layer.

The image tower is left alone; the multi-token-prediction head drafts. What the family shares with Qwen's other hybrids
is in ``hybrid_config.py`` and ``hybrid_decoder.py``.
Reference: Qwen Team 2026; names as in transformers' Qwen3_5MoeTextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from troth.models.expert_layers import experts_from_hf
from troth.models.hybrid_config import ExpertLayers, HybridConfig, qwen3_5_keys, text_config
from troth.models.hybrid_decoder import HybridModel

IGNORED: Final = ("mtp.*", "model.visual.*")
"""A draft head that is loaded is not ignored: ``models/registry.py`` leaves its pattern out then."""

Model = HybridModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(HybridConfig):
    """The numbers that define a model of this family."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read config.json of model_type qwen3_5_moe_text, or the ``text_config`` in one of qwen3_5_moe."""
        config = text_config(values, path)
        experts = experts_from_hf(config, num_experts=256, num_chosen=8, renormalises=True)
        return cls.read(config, ExpertLayers(experts=experts), **qwen3_5_keys(config))
