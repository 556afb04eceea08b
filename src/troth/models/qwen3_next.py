"""Qwen3-Next: gated delta net and gated attention, with a choice of experts in all feed-forward layers or some.

Its checkpoints hold the inputs of delta layers key head by key head; loading brings them into the order in which they
are computed. The multi-token-prediction head is left alone: the family's configs do not describe it. What the family
shares with Qwen's other hybrids is in ``hybrid_config.py`` and ``hybrid_decoder.py``.
Legend: D model width, G key heads and H value heads of sizes K and E.
Reference: Qwen Team 2025; names as in transformers' Qwen3NextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from troth.models.expert_layers import experts_from_hf
from troth.models.family import Placement
from troth.models.hybrid_config import ExpertLayers, HybridConfig
from troth.models.hybrid_decoder import HybridModel
from troth.models.strict_config import StrictConfig
from troth.nn.delta_net import DeltaConfig
from troth.nn.layer_source import LayerSource
from troth.nn.linear import Linear, stacked
from troth.weights.source import WeightSource

IGNORED: Final = ("mtp.*",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(HybridConfig):
    """The numbers that define a model of this family."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read config.json of model_type qwen3_next."""
        config = StrictConfig(values, path)
        config.one_of("use_sliding_window", (False,), False)
        experts = experts_from_hf(config, num_experts=512, num_chosen=10)
        every = config.integer("decoder_sparse_step", 1)
        return cls.read(config, ExpertLayers(experts=experts, every=every, dense=_dense_layers(config)))

    @property
    def draft_head_refusal(self) -> str:
        """Why the checkpoint's draft head cannot be loaded."""
        return "configs of its family do not say which draft head the checkpoint has"


class Model(HybridModel):
    """As HybridModel."""

    def __init__(self, config: Config, source: WeightSource, place: Placement) -> None:
        super().__init__(config, source, place, _delta_inputs)


def _dense_layers(config: StrictConfig) -> frozenset[int]:
    """``mlp_only_layers``. Raises ModelLoadError."""
    layers = config.optional("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(type(layer) is int and layer >= 0 for layer in layers):
        raise config.error("mlp_only_layers", f"must be a list of layers, not {layers!r}")
    return frozenset(layers)


def _delta_inputs(delta: DeltaConfig, parts: LayerSource, width: int) -> Linear:
    """A delta layer's projections: of each key head its query, its key, and values and gates of its value heads."""
    groups, shared = delta.num_key_heads, delta.num_value_heads // delta.num_key_heads
    keys, values = delta.key_dim, shared * delta.value_dim
    large, small = (
        parts.stored(f"{name}.weight", (groups * sum(sizes), width)).unflatten(0, (groups, sum(sizes))).split(sizes, 1)
        for name, sizes in (("in_proj_qkvz", [keys, keys, values, values]), ("in_proj_ba", [shared, shared]))
    )
    # q, k, v and the gate, then beta and the decay, each with its heads side by side.
    return stacked([rows.flatten(0, 1) for rows in (*large, *small)], None, parts.dtype, parts.device)
