"""Qwen3 (dense): llama's block with a norm over each query and key head, and optional sliding windows by layer.

Reference: Yang et al. 2025 (Qwen3); key names as in transformers' Qwen3Config and llama.cpp's ``qwen3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from troth.contracts.cache_spec import CacheSpec
from troth.models.dimensions import dimensions_from_gguf, dimensions_from_hf
from troth.models.family import Placement
from troth.models.layer_types import layer_types, sliding_windows
from troth.models.rope_keys import rope_from_gguf, rope_from_hf
from troth.models.strict_config import StrictConfig
from troth.nn.attention import SelfAttention, attention_specs
from troth.nn.decoder import Block, Decoder
from troth.nn.layer_source import LayerSource
from troth.nn.rope import RopeConfig, rotary_table
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable
from troth.weights.source import WeightSource

IGNORED: Final = ("*.rotary_emb.inv_freq",)
_DEFAULTS: Final = {"head_dim": 128, "max_position_embeddings": 32768}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The numbers that define a model of this family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Of each layer; None: everything before is seen."""
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    """True for every GGUF: whether there is an output layer is said by its tensor alone."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read config.json of model_type qwen3."""
        config = StrictConfig(values, path)
        config.one_of("hidden_act", ("silu",), "silu")
        size = dimensions_from_hf(config, _DEFAULTS)
        parsed = cls(
            **size,
            rope=rope_from_hf(config, size),
            windows=_windows(config, size["num_hidden_layers"]),
            attention_bias=config.flag("attention_bias", False),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
        )
        config.finish()
        return parsed

    @classmethod
    def from_gguf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read the ``qwen3.*`` keys of a GGUF header (prefix removed)."""
        config = StrictConfig(values, path)
        size = dimensions_from_gguf(config)
        parsed = cls(
            **size,
            rope=rope_from_gguf(config, size),
            windows=(None,) * size["num_hidden_layers"],
            tie_word_embeddings=True,
        )
        config.finish()
        return parsed

    def cache_specs(self, element_bytes: int) -> tuple[CacheSpec, ...]:
        """One group for full attention, one for windows, as far as there are such layers."""
        return attention_specs(self.windows, self.num_key_value_heads, self.head_dim, element_bytes)


class Model(Decoder):
    """A Qwen3 model built from its weights.

    Raises:
        ModelLoadError: a tensor is missing or has another shape.
    """

    def __init__(self, config: Config, source: WeightSource, place: Placement) -> None:
        self.config = config
        root = LayerSource(source=source, prefix="model.", dtype=place.dtype, device=place.device)
        table, head = root.vocabulary(
            "lm_head", (config.vocab_size, config.hidden_size), tied=config.tie_word_embeddings
        )
        rotary = rotary_table(config.rope, place.context_tokens, place.device)
        super().__init__(
            embedding=table,
            blocks=[
                _block(config, root.below(f"layers.{layer}."), layer, rotary)
                for layer in range(config.num_hidden_layers)
            ],
            norm_D=root.norm("norm", config.hidden_size),
            head=head,
            eps=config.rms_norm_eps,
            dtype=place.dtype,
        )


def _block(config: Config, layers: LayerSource, layer: int, rotary: RotaryTable) -> Block:
    width = config.hidden_size
    q_rows, kv_rows = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    parts = layers.below("self_attn.")
    return Block(
        attention_norm_D=layers.norm("input_layernorm", width),
        attention=SelfAttention(
            layer=layer,
            qkv=parts.linear(
                {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, width, bias=config.attention_bias
            ),
            out=parts.linear({"o_proj": width}, q_rows, bias=config.attention_bias),
            num_heads=config.num_attention_heads,
            rotary=rotary,
            scale=config.head_dim**-0.5,
            window=config.windows[layer],
            norms=HeadNorms(
                q_D=parts.norm("q_norm", config.head_dim),
                k_D=parts.norm("k_norm", config.head_dim),
                eps=config.rms_norm_eps,
            ),
        ),
        mlp_norm_D=layers.norm("post_attention_layernorm", width),
        mlp=layers.below("mlp.").gated_mlp(width, config.intermediate_size),
    )


def _windows(config: StrictConfig, num_layers: int) -> tuple[int | None, ...]:
    """Layers from ``max_window_layers`` on slide, if ``use_sliding_window`` says so at all."""
    sliding = config.flag("use_sliding_window", False)
    first = config.integer("max_window_layers", 28, least=0)
    older_rule = [
        "sliding_attention" if sliding and layer >= first else "full_attention" for layer in range(num_layers)
    ]
    allowed = ("full_attention", "sliding_attention") if sliding else ("full_attention",)
    return sliding_windows(config, layer_types(config, older_rule, allowed))
