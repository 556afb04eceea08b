"""Llama 2 and 3.x, Mistral, SmolLM2: pre-norm blocks of grouped-query attention and a SiLU-gated MLP.

Legend: T tokens, S sampled positions, D model width, V vocabulary.
Reference: Touvron et al. 2023; Jiang et al. 2023 (Mistral, sliding window).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import AttentionSpec, CacheSpec
from troth.models.family import Placement
from troth.models.strict_config import StrictConfig
from troth.nn.attention import SelfAttention
from troth.nn.batch import Batch
from troth.nn.linear import Linear, stacked
from troth.nn.mlp import GatedMLP
from troth.nn.rope import RopeConfig, frequencies, rope_config, rotary_table
from troth.ops.embedding import embedding
from troth.ops.linear import LinearWeight, linear, pack
from troth.ops.rms_norm import add_rms_norm, rms_norm
from troth.ops.rotary_kv_write import RotaryTable
from troth.weights.source import WeightSource

IGNORED: Final = ("*.rotary_emb.inv_freq",)


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

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read config.json of model_type llama or mistral."""
        config = StrictConfig(values, path)
        config.one_of("hidden_act", ("silu",), "silu")
        config.one_of("pretraining_tp", (1,), 1)
        heads = config.integer("num_attention_heads")
        hidden = config.integer("hidden_size")
        head_dim = config.integer("head_dim", hidden // heads)
        rope = config.mapping("rope_parameters") or config.mapping("rope_scaling") or {}
        theta = config.number("rope_theta", 10000.0)
        window = config.optional("sliding_window")
        parsed = cls(
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.integer("intermediate_size"),
            num_hidden_layers=config.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            max_position_embeddings=config.integer("max_position_embeddings", 2048),
            rope=rope_config(rope, head_dim=head_dim, default_theta=theta),
            sliding_window=None if window is None else config.integer("sliding_window"),
            attention_bias=config.flag("attention_bias", False),
            mlp_bias=config.flag("mlp_bias", False),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
        )
        config.finish(inert=("rope_interleaved",))
        return parsed

    @classmethod
    def from_gguf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read the ``llama.*`` keys of a GGUF header (prefix removed, ``vocab_size`` from the tokens if missing)."""
        config = StrictConfig(values, path)
        heads = config.integer("attention.head_count")
        hidden = config.integer("embedding_length")
        head_dim = config.integer("attention.key_length", hidden // heads)
        config.one_of("attention.value_length", (head_dim,), head_dim)
        rotary_dim = config.integer("rope.dimension_count", head_dim)
        theta = config.number("rope.freq_base", 10000.0)
        scaling = config.one_of("rope.scaling.type", ("none", "linear", "yarn"), "none")
        rope: dict[str, Any] = {"rope_type": "default" if scaling == "none" else scaling}
        if scaling != "none":
            rope["factor"] = config.number("rope.scaling.factor")
        original = config.optional("rope.scaling.original_context_length")
        if scaling == "yarn":
            rope["original_max_position_embeddings"] = original
        rope["partial_rotary_factor"] = rotary_dim / head_dim
        parsed = cls(
            vocab_size=config.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=config.integer("feed_forward_length"),
            num_hidden_layers=config.integer("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=config.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=config.number("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=config.integer("context_length"),
            rope=rope_config(rope, head_dim=head_dim, default_theta=theta),
        )
        config.one_of("expert_count", (0,), 0)
        config.one_of("expert_used_count", (0,), 0)
        config.finish()
        return parsed

    def cache_specs(self, element_bytes: int) -> tuple[CacheSpec, ...]:
        """One group: every layer attends the same way."""
        return (
            AttentionSpec(
                layers=tuple(range(self.num_hidden_layers)),
                num_kv_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
                value_dim=self.head_dim,
                element_bytes=element_bytes,
                window=self.sliding_window,
            ),
        )


@dataclass(slots=True)
class Block:
    """x + attention(norm x), then + mlp(norm x)."""

    attention_norm_D: Tensor
    attention: SelfAttention
    mlp_norm_D: Tensor
    mlp: GatedMLP


class Model:
    """A llama-family model built from its weights.

    Raises:
        ModelLoadError: a tensor is missing or has another shape.
    """

    def __init__(self, config: Config, source: WeightSource, place: Placement) -> None:
        self.config = config
        self._dtype = place.dtype
        self._eps = config.rms_norm_eps
        shape = (config.vocab_size, config.hidden_size)
        table = source.linear("model.embed_tokens.weight", shape=shape)
        self._embedding: LinearWeight = pack([table], place.dtype, place.device)
        rotary = _rotary(config, source, place)
        self._blocks = [build_block(config, source, place, layer, rotary) for layer in range(config.num_hidden_layers)]
        self._norm_D = source.norm("model.norm.weight", shape=(config.hidden_size,)).to(place.device)
        tied = config.tie_word_embeddings or not source.has("lm_head.weight")
        self._head: LinearWeight = (
            self._embedding if tied else pack([source.linear("lm_head.weight", shape=shape)], place.dtype, place.device)
        )

    def forward(self, batch: Batch, cache: CacheStorage) -> Tensor:
        """As models.family.Model."""
        residual_TD = embedding(batch.token_ids_T, self._embedding, self._dtype)
        x_TD = rms_norm(residual_TD, self._blocks[0].attention_norm_D, self._eps)
        for i, block in enumerate(self._blocks):
            if i > 0:
                x_TD, residual_TD = add_rms_norm(x_TD, residual_TD, block.attention_norm_D, self._eps)
            x_TD = block.attention(x_TD, batch, cache)
            x_TD, residual_TD = add_rms_norm(x_TD, residual_TD, block.mlp_norm_D, self._eps)
            x_TD = block.mlp(x_TD)
        return add_rms_norm(x_TD, residual_TD, self._norm_D, self._eps)[0]

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """As models.family.Model."""
        return linear(hidden_SD, self._head).float()


def build_block(config: Config, source: WeightSource, place: Placement, layer: int, rotary: RotaryTable) -> Block:
    """One block from the tensors of ``model.layers.{layer}``."""
    prefix = f"model.layers.{layer}."
    width, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))

    def projection(names: dict[str, int], inputs: int, bias: bool) -> Linear:
        weights = [source.linear(f"{prefix}{n}.weight", shape=(rows, inputs)) for n, rows in names.items()]
        biases = [source.tensor(f"{prefix}{n}.bias", shape=(rows,)) for n, rows in names.items()] if bias else None
        return stacked(weights, biases, place.dtype, place.device)

    def norm(name: str) -> Tensor:
        return source.norm(f"{prefix}{name}.weight", shape=(width,)).to(place.device)

    qkv = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
    return Block(
        attention_norm_D=norm("input_layernorm"),
        attention=SelfAttention(
            layer=layer,
            qkv=projection(qkv, width, config.attention_bias),
            out=projection({"self_attn.o_proj": width}, q_rows, config.attention_bias),
            num_heads=config.num_attention_heads,
            rotary=rotary,
            scale=config.head_dim**-0.5,
            window=config.sliding_window,
        ),
        mlp_norm_D=norm("post_attention_layernorm"),
        mlp=GatedMLP(
            gate_up=projection({"mlp.gate_proj": inner, "mlp.up_proj": inner}, width, config.mlp_bias),
            down=projection({"mlp.down_proj": width}, inner, config.mlp_bias),
        ),
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
