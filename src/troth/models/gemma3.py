"""Gemma 3, text: blocks of four zero-centred norms, head norms, and layers that see a window or everything.

The image tower of the larger models is left alone. Legend: T tokens, S sampled positions, D model width, V vocabulary.
Reference: Gemma Team 2025 (Gemma 3); key names as in transformers' Gemma3TextConfig and llama.cpp's ``gemma3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import CacheSpec
from troth.models.dimensions import Dimensions, dimensions_from_gguf, dimensions_from_hf
from troth.models.family import Placement
from troth.models.layer_types import layer_types, sliding_windows
from troth.models.rope_keys import rope_from_gguf, rope_from_values
from troth.models.strict_config import StrictConfig
from troth.nn.attention import SelfAttention, attention_specs
from troth.nn.batch import Batch
from troth.nn.layer_source import LayerSource
from troth.nn.mlp import GatedMLP
from troth.nn.rope import RopeConfig, rotary_table
from troth.ops.embedding import embedding
from troth.ops.linear import linear
from troth.ops.rms_norm import add_rms_norm, rms_norm
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable
from troth.weights.source import WeightSource

IGNORED: Final = ("vision_tower.*", "model.vision_tower.*", "multi_modal_projector.*", "model.multi_modal_projector.*")
_LAYOUTS: Final = (
    ("model.", "lm_head"),
    ("language_model.model.", "language_model.lm_head"),
    ("model.language_model.", "lm_head"),
)
"""Where the text model's tensors lie and the output layer's name: alone, and beside an image tower."""

_DEFAULTS: Final = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
"""The published multimodal configs leave these out."""
_IMAGE_TOKEN_KEYS: Final = (
    *("image_token_index", "boi_token_index", "eoi_token_index"),
    *("image_token_id", "boi_token_id", "eoi_token_id"),
)
_GLOBAL_THETA: Final = 1e6
_LOCAL_THETA: Final = 1e4
_LAYERS_PER_FULL: Final = 6
_FULL, _SLIDING = "full_attention", "sliding_attention"


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
    rope_global: RopeConfig
    rope_local: RopeConfig
    """Of layers with a window."""
    windows: tuple[int | None, ...]
    """Of each layer; None: everything before is seen."""
    query_pre_attn_scalar: float
    """Scores are divided by its root."""
    final_logit_softcapping: float | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    """True for every GGUF: whether there is an output layer is said by its tensor alone."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read config.json of model_type gemma3_text, or the ``text_config`` in one of gemma3."""
        whole = StrictConfig(values, path)
        text = whole.mapping("text_config")
        if text is None:
            return cls._from_text(whole)
        # The image tower is not loaded; the ids say which tokens its outputs would replace.
        whole.finish(inert=("vision_config", "mm_tokens_per_image", "tie_word_embeddings", *_IMAGE_TOKEN_KEYS))
        tied = {key: values[key] for key in ("tie_word_embeddings",) if values.get(key) is not None}
        return cls._from_text(StrictConfig({**text, **tied}, f"{path}: text_config"))

    @classmethod
    def _from_text(cls, config: StrictConfig) -> Config:
        config.one_of("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
        config.one_of("use_bidirectional_attention", (False,), False)
        if config.optional("attn_logit_softcapping") is not None:
            raise config.error("attn_logit_softcapping", "is Gemma 2's; no Gemma 3 model defines what it does")
        size = dimensions_from_hf(config, _DEFAULTS)
        rope_global, rope_local = _ropes(config, size)
        cap = config.optional("final_logit_softcapping")
        parsed = cls(
            **size,
            rope_global=rope_global,
            rope_local=rope_local,
            windows=_windows(config, size["num_hidden_layers"]),
            query_pre_attn_scalar=config.number("query_pre_attn_scalar", 256),
            final_logit_softcapping=None if cap is None else config.number("final_logit_softcapping"),
            attention_bias=config.flag("attention_bias", False),
            tie_word_embeddings=config.flag("tie_word_embeddings", True),
        )
        config.finish(inert=("cache_implementation",))
        return parsed

    @classmethod
    def from_gguf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read the ``gemma3.*`` keys of a GGUF header (prefix removed).

        The pattern of layers and the local theta are not in the file; nor is the scale of scores, which is that of
        the head size except in the model of 62 layers.
        """
        config = StrictConfig(values, path)
        size = dimensions_from_gguf(config)
        layers, head_dim = size["num_hidden_layers"], size["head_dim"]
        window = config.integer("attention.sliding_window")
        local = {"rope_theta": config.number("rope.freq_base_swa", _LOCAL_THETA)}
        cap = config.optional("final_logit_softcapping")
        parsed = cls(
            **size,
            rope_global=rope_from_gguf(config, size, theta=_GLOBAL_THETA),
            rope_local=rope_from_values(
                config, local, rotary_dim=head_dim, default_theta=_LOCAL_THETA, context_tokens=window
            ),
            windows=tuple(None if kind == _FULL else window for kind in _one_full_in(_LAYERS_PER_FULL, layers)),
            query_pre_attn_scalar=size["hidden_size"] // size["num_attention_heads"] if layers == 62 else head_dim,
            final_logit_softcapping=None if cap is None else config.number("final_logit_softcapping"),
        )
        config.finish()
        return parsed

    def cache_specs(self, element_bytes: int) -> tuple[CacheSpec, ...]:
        """One group for full attention, one for the window."""
        return attention_specs(self.windows, self.num_key_value_heads, self.head_dim, element_bytes)


@dataclass(slots=True)
class Block:
    """x + norm(attention(norm x)), then + norm(mlp(norm x))."""

    input_norm_D: Tensor
    attention: SelfAttention
    attention_out_norm_D: Tensor
    mlp_in_norm_D: Tensor
    mlp: GatedMLP
    mlp_out_norm_D: Tensor


class Model:
    """A Gemma 3 text model built from its weights.

    Raises:
        ModelLoadError: a tensor is missing or has another shape.
    """

    def __init__(self, config: Config, source: WeightSource, place: Placement) -> None:
        self.config = config
        self.draft_head = None
        """The family has none."""
        self._dtype = place.dtype
        self._eps = config.rms_norm_eps
        # The reference rounds the factor to the dtype of the embeddings: in bfloat16 sqrt(640) is 25.25, not 25.30.
        self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=place.dtype))
        prefix, head = next((at for at in _LAYOUTS if source.has(f"{at[0]}embed_tokens.weight")), _LAYOUTS[0])
        root = LayerSource(source=source, prefix=prefix, dtype=place.dtype, device=place.device)
        self._embedding, self._head = root.vocabulary(
            head, (config.vocab_size, config.hidden_size), tied=config.tie_word_embeddings
        )
        rotary_global = rotary_table(config.rope_global, place.context_tokens, place.device)
        rotary_local = rotary_table(config.rope_local, place.context_tokens, place.device)
        self._blocks = [
            _block(config, root.below(f"layers.{layer}."), layer, rotary_global if window is None else rotary_local)
            for layer, window in enumerate(config.windows)
        ]
        self._norm_D = root.norm("norm", config.hidden_size, zero_centred=True)

    def forward(self, batch: Batch, cache: CacheStorage) -> Tensor:
        """As models.family.Model."""
        residual_TD = embedding(batch.token_ids_T, self._embedding, self._dtype, self._embedding_scale)
        x_TD, rows = rms_norm(residual_TD, self._blocks[0].input_norm_D, self._eps), batch.rows
        for i, block in enumerate(self._blocks):
            if i > 0:
                x_TD, residual_TD = add_rms_norm(x_TD, residual_TD, block.input_norm_D, self._eps)
            x_TD = block.attention(x_TD, batch, cache)
            if block is self._blocks[-1]:
                x_TD, residual_TD, rows = batch.last_layer(x_TD, residual_TD)
            x_TD = rms_norm(x_TD, block.attention_out_norm_D, self._eps)
            x_TD, residual_TD = add_rms_norm(x_TD, residual_TD, block.mlp_in_norm_D, self._eps)
            x_TD = rms_norm(block.mlp(x_TD, rows), block.mlp_out_norm_D, self._eps)
        return add_rms_norm(x_TD, residual_TD, self._norm_D, self._eps)[0]

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """As models.family.Model."""
        logits_SV = linear(hidden_SD, self._head).float()
        cap = self.config.final_logit_softcapping
        return logits_SV if cap is None else logits_SV.div_(cap).tanh_().mul_(cap)


def _block(config: Config, layers: LayerSource, layer: int, rotary: RotaryTable) -> Block:
    width, bias = config.hidden_size, config.attention_bias
    q_rows, kv_rows = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    parts = layers.below("self_attn.")
    return Block(
        input_norm_D=layers.norm("input_layernorm", width, zero_centred=True),
        attention=SelfAttention(
            layer=layer,
            qkv=parts.linear({"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, width, bias=bias),
            out=parts.linear({"o_proj": width}, q_rows, bias=bias),
            num_heads=config.num_attention_heads,
            rotary=rotary,
            scale=config.query_pre_attn_scalar**-0.5,
            window=config.windows[layer],
            norms=HeadNorms(
                q_D=parts.norm("q_norm", config.head_dim, zero_centred=True),
                k_D=parts.norm("k_norm", config.head_dim, zero_centred=True),
                eps=config.rms_norm_eps,
            ),
        ),
        attention_out_norm_D=layers.norm("post_attention_layernorm", width, zero_centred=True),
        mlp_in_norm_D=layers.norm("pre_feedforward_layernorm", width, zero_centred=True),
        mlp=layers.below("mlp.").gated_mlp(width, config.intermediate_size, activation="gelu_tanh"),
        mlp_out_norm_D=layers.norm("post_feedforward_layernorm", width, zero_centred=True),
    )


def _ropes(config: StrictConfig, size: Dimensions) -> tuple[RopeConfig, RopeConfig]:
    """Rotation of layers that see everything, and of those with a window. Older configs scale the former only."""
    newer, older = config.mapping("rope_parameters"), config.mapping("rope_scaling")
    if newer is not None and (older is not None or newer.keys() - {_FULL, _SLIDING}):
        raise config.error("rope_parameters", f"must be all there is and name layer types only, not {newer!r}")
    by_type = newer or {_FULL: older}
    theta = {
        _FULL: config.number("rope_theta", _GLOBAL_THETA),
        _SLIDING: config.number("rope_local_base_freq", _LOCAL_THETA),
    }
    full, sliding = (
        rope_from_values(
            config,
            by_type.get(kind) or {},
            rotary_dim=size["head_dim"],
            default_theta=theta[kind],
            context_tokens=size["max_position_embeddings"],
        )
        for kind in (_FULL, _SLIDING)
    )
    return full, sliding


def _windows(config: StrictConfig, num_layers: int) -> tuple[int | None, ...]:
    period = config.integer("sliding_window_pattern", _LAYERS_PER_FULL)
    config.optional("_sliding_window_pattern")  # written by transformers 5 beside the list it was turned into
    return sliding_windows(config, layer_types(config, _one_full_in(period, num_layers), (_FULL, _SLIDING)))


def _one_full_in(period: int, num_layers: int) -> list[str]:
    """The last layer of each period sees everything, the others a window."""
    return [_SLIDING if (layer + 1) % period else _FULL for layer in range(num_layers)]
