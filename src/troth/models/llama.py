"""Llama 2 and 3.x, Mistral, SmolLM2: pre-norm blocks of grouped-query attention and a SiLU-gated MLP.

Reference: Touvron et al. 2023; Jiang et al. 2023 (Mistral, sliding window).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from troth.contracts.cache_spec import CacheSpec
from troth.models.dimensions import dimensions_from_gguf, dimensions_from_hf
from troth.models.family import Placement
from troth.models.rope_keys import rope_from_gguf, rope_from_hf
from troth.models.strict_config import StrictConfig
from troth.nn.attention import SelfAttention, attention_specs
from troth.nn.decoder import Block, Decoder
from troth.nn.layer_source import LayerSource
from troth.nn.rope import RopeConfig, frequencies, rotary_table
from troth.ops.rotary_kv_write import RotaryTable
from troth.weights.source import WeightSource

IGNORED: Final = ("*.rotary_emb.inv_freq",)
_DEFAULTS: Final = {"max_position_embeddings": 2048}


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
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    """True for every GGUF: whether there is an output layer is said by its tensor alone."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read config.json of model_type llama or mistral."""
        config = StrictConfig(values, path)
        config.one_of("hidden_act", ("silu",), "silu")
        config.one_of("pretraining_tp", (1,), 1)
        config.one_of("rope_interleaved", (False,), False)
        size = dimensions_from_hf(config, _DEFAULTS)
        window = config.optional("sliding_window")
        parsed = cls(
            **size,
            rope=rope_from_hf(config, size),
            sliding_window=None if window is None else config.integer("sliding_window"),
            attention_bias=config.flag("attention_bias", False),
            mlp_bias=config.flag("mlp_bias", False),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
        )
        config.finish()
        return parsed

    @classmethod
    def from_gguf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read the ``llama.*`` keys of a GGUF header (prefix removed, ``vocab_size`` from the tokens if missing)."""
        config = StrictConfig(values, path)
        size = dimensions_from_gguf(config)
        parsed = cls(
            **size,
            rope=rope_from_gguf(config, size),
            tie_word_embeddings=True,
        )
        config.one_of("expert_count", (0,), 0)
        config.one_of("expert_used_count", (0,), 0)
        config.finish()
        return parsed

    def cache_specs(self, element_bytes: int) -> tuple[CacheSpec, ...]:
        """One group: every layer attends the same way."""
        windows = (self.sliding_window,) * self.num_hidden_layers
        return attention_specs(windows, self.num_key_value_heads, self.head_dim, element_bytes)


class Model(Decoder):
    """A llama-family model built from its weights.

    Raises:
        ModelLoadError: a tensor is missing or has another shape.
    """

    def __init__(self, config: Config, source: WeightSource, place: Placement) -> None:
        self.config = config
        root = LayerSource(source=source, prefix="model.", dtype=place.dtype, device=place.device)
        table, head = root.vocabulary(
            "lm_head", (config.vocab_size, config.hidden_size), tied=config.tie_word_embeddings
        )
        rotary = _rotary(config, source, place)
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
            window=config.sliding_window,
        ),
        mlp_norm_D=layers.norm("post_attention_layernorm", width),
        mlp=layers.below("mlp.").gated_mlp(width, config.intermediate_size, bias=config.mlp_bias),
    )


def _rotary(config: Config, source: WeightSource, place: Placement) -> RotaryTable:
    """The rotary table; GGUF files carry Llama 3.1's scaling as divisors of the frequencies."""
    divisors = source.optional_tensor("rope_freqs.weight")
    if divisors is None:
        return rotary_table(config.rope, place.context_tokens, place.device)
    frequency_W, factor = frequencies(config.rope)
    angle_PW = torch.arange(place.context_tokens, dtype=torch.float64)[:, None] * (frequency_W / divisors.double())
    return RotaryTable(
        (angle_PW.cos() * factor).float().to(place.device), (angle_PW.sin() * factor).float().to(place.device)
    )
