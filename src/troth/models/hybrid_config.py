"""The numbers of Qwen's hybrids: gated delta net in most layers, gated attention in the others.

Owns the keys that qwen3_5, qwen3_5_moe and qwen3_next share, and what such models cache; each family reads its own keys
beside them. Next: ``hybrid_decoder.py``, which builds a model of them.
References: Qwen Team 2025; names as in transformers' Qwen3_5TextConfig and Qwen3NextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from troth.contracts.cache_spec import AttentionSpec, CacheSpec, RecurrentSpec, StateTensor
from troth.models.dimensions import dimensions_from_hf
from troth.models.expert_layers import ExpertsConfig
from troth.models.layer_types import layer_types
from troth.models.rope_keys import rope_from_hf
from troth.models.strict_config import StrictConfig
from troth.nn.delta_net import DeltaConfig
from troth.nn.rope import RopeConfig

FULL, LINEAR = "full_attention", "linear_attention"
_DEFAULTS: Final = {"head_dim": 256, "max_position_embeddings": 32768}
_STATE_BYTES: Final = 4
"""States are float32 whatever the activations are: a recurrence adds up what rounding does to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """Which layers choose among experts: every so many, but for those that are dense."""

    experts: ExpertsConfig
    """Of each of them, and of the draft head."""
    every: int = 1
    dense: frozenset[int] = frozenset()

    def include(self, layer: int) -> bool:
        """Whether the layer is one of them."""
        return layer not in self.dense and (layer + 1) % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """The numbers that define a model of these families."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Values that a token has inside the widest feed-forward layer."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    layer_types: tuple[str, ...]
    """full_attention or linear_attention."""
    delta: DeltaConfig
    dense_size: int
    """Inner width of feed-forward layers without experts."""
    experts: ExpertsConfig | None = None
    expert_layers: frozenset[int] = frozenset()
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    num_draft_layers: int = 0
    """Layers of the draft head that the checkpoint has."""
    has_own_draft_embedding: bool = False
    loads_draft_head: bool = False

    @classmethod
    def read(cls, config: StrictConfig, sparse: ExpertLayers | None = None, **own: Any) -> Self:
        """Read the keys that all these families have, and refuse those that nobody read.

        Args:
            config: where to read; the family has read its own keys.
            sparse: the layers of experts; None: there are none.
            own: fields that the family read.

        Raises:
            ModelLoadError: a key is missing, unknown, of the wrong kind or not computed.
        """
        config.one_of("hidden_act", ("silu",), "silu")
        # Where every layer has experts, configs may leave intermediate_size out.
        size = dimensions_from_hf(config, {**_DEFAULTS, **({} if sparse is None else {"intermediate_size": 1})})
        layers, dense_size = range(size["num_hidden_layers"]), size["intermediate_size"]
        expert_layers = frozenset(filter(sparse.include, layers)) if sparse is not None else frozenset[int]()
        if len(expert_layers) < len(layers):
            dense_size = config.integer("intermediate_size")
        if sparse is not None and expert_layers:
            size["intermediate_size"] = max(dense_size, sparse.experts.inner_size(size["hidden_size"]))
        interval = config.integer("full_attention_interval", 4)
        older_rule = [LINEAR if (layer + 1) % interval else FULL for layer in layers]
        parsed = cls(
            **size,
            rope=rope_from_hf(config, size, fraction=0.25),
            layer_types=layer_types(config, older_rule, (FULL, LINEAR)),
            delta=_delta(config),
            dense_size=dense_size,
            experts=None if sparse is None else sparse.experts,
            expert_layers=expert_layers,
            attention_bias=config.flag("attention_bias", False),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            **own,
        )
        config.finish()
        return parsed

    def cache_specs(self, element_bytes: int) -> tuple[CacheSpec, ...]:
        """Blocks for the layers of full attention and of the draft head, a state per row for the delta layers."""
        delta = self.delta
        draft_layers = (self.num_hidden_layers,) if self.loads_draft_head else ()
        groups: tuple[CacheSpec, ...] = (
            AttentionSpec(
                layers=self._layers(FULL) + draft_layers,
                frontier_width=self.hidden_size if draft_layers else 0,
                num_kv_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
                value_dim=self.head_dim,
                element_bytes=element_bytes,
            ),
            RecurrentSpec(
                layers=self._layers(LINEAR),
                tensors=(
                    StateTensor((delta.num_taps - 1, delta.conv_width), _STATE_BYTES),
                    StateTensor((delta.num_value_heads, delta.key_dim, delta.value_dim), _STATE_BYTES),
                ),
                trail=(
                    StateTensor((delta.conv_width,), _STATE_BYTES),
                    StateTensor((delta.trail_width,), _STATE_BYTES),
                ),
            ),
        )
        return tuple(group for group in groups if group.layers)

    @property
    def draft_head_refusal(self) -> str | None:
        """Why the checkpoint's draft head cannot be loaded; None: it can."""
        if self.num_draft_layers == 0:
            return "the checkpoint has no draft head"
        if self.num_draft_layers > 1:
            return f"its draft head has {self.num_draft_layers} layers; heads of one are computed"
        return "its draft head has an embedding of its own" if self.has_own_draft_embedding else None

    def with_draft_head(self) -> Self:
        """The same, with the draft head loaded and cached."""
        return replace(self, loads_draft_head=True)

    def _layers(self, kind: str) -> tuple[int, ...]:
        return tuple(layer for layer, other in enumerate(self.layer_types) if other == kind)


def text_config(values: Mapping[str, Any], path: str) -> StrictConfig:
    """The text model's part of a config.json that may have an image tower beside it.

    Raises:
        ModelLoadError: there are other things beside it.
    """
    whole = StrictConfig(values, path)
    text = whole.mapping("text_config")
    if text is None:
        return whole
    # The image tower is not loaded; the ids say which tokens its outputs would replace.
    whole.finish(
        inert=(
            *("vision_config", "language_model_only", "tie_word_embeddings"),
            *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        )
    )
    tied = {key: values[key] for key in ("tie_word_embeddings",) if values.get(key) is not None}
    return StrictConfig({**text, **tied}, f"{path}: text_config")


def qwen3_5_keys(config: StrictConfig) -> Mapping[str, Any]:
    """What both Qwen3.5 families say beside the shared keys: fields of HybridConfig.

    Raises:
        ModelLoadError: a key says what is not computed.
    """
    config.one_of("attn_output_gate", (True,), True)
    config.one_of("output_gate_type", ("swish",), "swish")
    config.one_of("mamba_ssm_dtype", ("float32",), "float32")
    config.one_of("mlp_only_layers", ([],), [])
    return {
        "num_draft_layers": config.integer("mtp_num_hidden_layers", 0, least=0),
        "has_own_draft_embedding": config.flag("mtp_use_dedicated_embeddings", False),
    }


def _delta(config: StrictConfig) -> DeltaConfig:
    key_heads, value_heads = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise config.error("linear_num_value_heads", f"{value_heads} heads cannot share {key_heads} key heads")
    return DeltaConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        num_taps=config.integer("linear_conv_kernel_dim", 4, least=2),
    )
