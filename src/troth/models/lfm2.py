"""LFM2: most layers mix tokens by a gated convolution over the last few, the others by attention with head norms.

Next: ``ops/short_conv.py`` for the convolution, ``docs/adr/0012`` for what its layers keep of a row.
Legend: T tokens, D model width, K taps.
Reference: Liquid AI 2025 (LFM2); names as in transformers' Lfm2Config and llama.cpp's ``lfm2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import AttentionSpec, CacheSpec, RecurrentSpec, StateTensor
from troth.models.dimensions import Dimensions, dimensions_from_gguf, dimensions_from_hf
from troth.models.family import Placement
from troth.models.layer_types import layer_types
from troth.models.rope_keys import rope_from_gguf, rope_from_hf
from troth.models.strict_config import StrictConfig
from troth.nn.attention import SelfAttention
from troth.nn.batch import Batch
from troth.nn.decoder import Attention, Block, Decoder
from troth.nn.layer_source import LayerSource
from troth.nn.linear import Linear
from troth.nn.mlp import GatedMLP
from troth.nn.rope import RopeConfig, rotary_table
from troth.ops.multiply import multiply
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable
from troth.ops.short_conv import short_conv
from troth.weights.source import WeightSource

IGNORED: Final = ()
_DEFAULTS: Final = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
}
_THETA: Final = 1e6
_FULL, _CONV = "full_attention", "conv"
_STATE_BYTES: Final = 4
_INITIALISATION: Final = (
    "block_mlp_init_scale",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_use_xavier_init",
)
"""Keys of published configs that say how weights were drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The numbers that define a model of this family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the feed-forward layers as they are: what a config.json says is adjusted first."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    layer_types: tuple[str, ...]
    """full_attention or conv."""
    num_taps: int
    """Of the convolutions."""
    taps_shape: tuple[int, ...]
    """Of a convolution's weight in the file: GGUF leaves out the 1 in the middle."""
    tie_word_embeddings: bool = True
    """True for every GGUF: whether there is an output layer is said by its tensor alone."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read config.json of model_type lfm2."""
        config = StrictConfig(values, path)
        config.one_of("conv_bias", (False,), False)
        config.one_of("block_use_swiglu", (True,), True)
        config.one_of("use_pos_enc", (True,), True)
        eps = config.number("norm_eps", 1e-5)
        size = dimensions_from_hf(config, _DEFAULTS)
        size["rms_norm_eps"] = eps
        size["intermediate_size"] = _feed_forward_size(config, size["intermediate_size"])
        rope = rope_from_hf(config, size, theta=_THETA)
        taps = config.integer("conv_L_cache", 3, least=2)
        parsed = cls(
            **size,
            rope=rope,
            layer_types=layer_types(config, _listed_layers(config, size["num_hidden_layers"]), (_FULL, _CONV)),
            num_taps=taps,
            taps_shape=(size["hidden_size"], 1, taps),
            tie_word_embeddings=config.flag("tie_embedding", config.flag("tie_word_embeddings", True)),
        )
        _check_second_names(config, size, rope)
        config.finish(inert=_INITIALISATION)
        return parsed

    @classmethod
    def from_gguf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read the ``lfm2.*`` keys of a GGUF header (prefix removed).

        ``attention.head_count_kv`` lists a number for each layer; a layer with 0 is a convolution.
        """
        counts = _heads_by_layer(values, path)
        config = StrictConfig({**values, "attention.head_count_kv": max(counts, default=0) or None}, path)
        size = dimensions_from_gguf(config)
        if len(counts) != size["num_hidden_layers"]:
            problem = f"lists {len(counts)} layers, but block_count is {size['num_hidden_layers']}"
            raise config.error("attention.head_count_kv", problem)
        taps = config.integer("shortconv.l_cache", least=2)
        parsed = cls(
            **size,
            rope=rope_from_gguf(config, size),
            layer_types=tuple(_FULL if count else _CONV for count in counts),
            num_taps=taps,
            taps_shape=(size["hidden_size"], taps),
        )
        config.finish()
        return parsed

    def cache_specs(self, element_bytes: int) -> tuple[CacheSpec, ...]:
        """Blocks for the layers of attention, the last inputs of each row for the convolutions."""
        inputs = StateTensor((self.num_taps - 1, self.hidden_size), _STATE_BYTES)
        groups: tuple[CacheSpec, ...] = (
            AttentionSpec(
                layers=self._layers(_FULL),
                num_kv_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
                value_dim=self.head_dim,
                element_bytes=element_bytes,
            ),
            RecurrentSpec(
                layers=self._layers(_CONV),
                tensors=(inputs,),
                trail=(StateTensor((self.hidden_size,), _STATE_BYTES),),
            ),
        )
        return tuple(group for group in groups if group.layers)

    def _layers(self, kind: str) -> tuple[int, ...]:
        return tuple(layer for layer, other in enumerate(self.layer_types) if other == kind)


@dataclass(slots=True)
class GatedConv:
    """out(c * conv(b * x)): the layer's input makes both gates and what passes them."""

    layer: int
    bcx: Linear
    """D -> 3 D: the gate before, the gate behind, what is convolved."""
    conv_KD: Tensor
    out: Linear

    def __call__(self, x_TD: Tensor, batch: Batch, cache: CacheStorage) -> Tensor:
        """As nn.decoder.Attention."""
        (state,), (trail,) = cache.states[self.layer], cache.trails[self.layer]
        before_TD, behind_TD, inner_TD = self.bcx(x_TD, batch.rows).chunk(3, dim=-1)
        mixed_TD = short_conv(multiply(inner_TD, before_TD), self.conv_KD, state, trail, batch.rows, silu=False)
        return self.out(multiply(mixed_TD, behind_TD), batch.rows)


class Model(Decoder):
    """An LFM2 model built from its weights.

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
            norm_D=root.norm("embedding_norm", config.hidden_size),
            head=head,
            eps=config.rms_norm_eps,
            dtype=place.dtype,
        )


def _block(config: Config, layers: LayerSource, layer: int, rotary: RotaryTable) -> Block:
    width, inner, parts = config.hidden_size, config.intermediate_size, layers.below("feed_forward.")
    return Block(
        attention_norm_D=layers.norm("operator_norm", width),
        attention=_mixer(config, layers, layer, rotary),
        mlp_norm_D=layers.norm("ffn_norm", width),
        mlp=GatedMLP(gate_up=parts.linear({"w1": inner, "w3": inner}, width), down=parts.linear({"w2": width}, inner)),
    )


def _mixer(config: Config, layers: LayerSource, layer: int, rotary: RotaryTable) -> Attention:
    width = config.hidden_size
    if config.layer_types[layer] == _CONV:
        parts = layers.below("conv.")
        taps = parts.tensor("conv.weight", config.taps_shape)
        return GatedConv(
            layer=layer,
            bcx=parts.linear({"in_proj": 3 * width}, width),
            conv_KD=taps.reshape(width, config.num_taps).T.contiguous(),
            out=parts.linear({"out_proj": width}, width),
        )
    parts = layers.below("self_attn.")
    q_rows, kv_rows = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    return SelfAttention(
        layer=layer,
        qkv=parts.linear({"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, width),
        out=parts.linear({"out_proj": width}, q_rows),
        num_heads=config.num_attention_heads,
        rotary=rotary,
        scale=config.head_dim**-0.5,
        norms=HeadNorms(
            q_D=parts.norm("q_layernorm", config.head_dim),
            k_D=parts.norm("k_layernorm", config.head_dim),
            eps=config.rms_norm_eps,
        ),
    )


def _feed_forward_size(config: StrictConfig, size: int) -> int:
    """Two thirds of ``block_ff_dim``, or else of ``intermediate_size``, times a factor, rounded up to a multiple."""
    size = config.integer("block_ff_dim", size)
    factor, multiple = config.number("block_ffn_dim_multiplier", 1.0), config.integer("block_multiple_of", 256)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    return -(-int(factor * (2 * size // 3)) // multiple) * multiple


def _listed_layers(config: StrictConfig, num_layers: int) -> list[str]:
    """What ``full_attn_idxs`` makes of each layer; without it every layer attends."""
    indices = config.optional("full_attn_idxs")
    if indices is None:
        return [_FULL] * num_layers
    if not isinstance(indices, list) or not all(type(i) is int and 0 <= i < num_layers for i in indices):
        raise config.error("full_attn_idxs", f"must be a list of layers below {num_layers}, not {indices!r}")
    return [_FULL if layer in indices else _CONV for layer in range(num_layers)]


def _check_second_names(config: StrictConfig, size: Dimensions, rope: RopeConfig) -> None:
    """Published configs say some numbers twice; where the second says another, nobody knows which one was meant."""
    width = size["hidden_size"]
    second = {
        "block_dim": width,
        "conv_dim": width,
        "conv_dim_out": width,
        "num_heads": size["num_attention_heads"],
        "block_norm_eps": size["rms_norm_eps"],
        "rms_norm_eps": size["rms_norm_eps"],
        "theta": rope.theta,
    }
    for key, value in second.items():
        if (other := config.optional(key)) is not None and other != value:
            raise config.error(key, f"says {other!r}, but what it repeats is {value!r}")


def _heads_by_layer(values: Mapping[str, Any], path: str) -> list[int]:
    counts = values.get("attention.head_count_kv")
    if isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts):
        numbers: list[int] = counts
        if len({*numbers} - {0}) <= 1:
            return numbers
    problem = f"must list heads of keys and values for each layer, one number or 0, not {counts!r:.80}"
    raise StrictConfig(values, path).error("attention.head_count_kv", problem)
