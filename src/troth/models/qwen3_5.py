"""Qwen3.5, text: three layers of gated delta net for each layer of gated attention.

The image tower is left alone. The multi-token-prediction head ``mtp.*`` takes no part in the model's own answer: it
drafts, and is loaded where the config says so (``with_draft_head``).
Legend: T tokens, S sampled positions, R rows, B blocks per table, D model width, G key heads and H value heads of a
delta layer with sizes K and E, C = 2 G K + H E, W = C + H E + 2 H.
Reference: Yang, Kautz, Hatamizadeh 2024 (Gated DeltaNet); Qwen Team 2025; names as in transformers' Qwen3_5TextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor

from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import AttentionSpec, CacheSpec, RecurrentSpec, StateTensor
from troth.models.dimensions import dimensions_from_hf
from troth.models.family import Placement
from troth.models.layer_types import layer_types
from troth.models.rope_keys import rope_from_hf
from troth.models.strict_config import StrictConfig
from troth.nn.batch import Batch
from troth.nn.decoder import Attention, Block, Decoder
from troth.nn.draft_head import DraftHead, LastPairs, Pairs
from troth.nn.layer_source import LayerSource
from troth.nn.linear import Linear, stacked
from troth.nn.rope import RopeConfig, rotary_table
from troth.ops.attention import attention
from troth.ops.gated_delta import Decay, gated_delta, trail_size
from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.layer_kv import LayerKV
from troth.ops.linear import LinearWeight
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write
from troth.ops.rows import Rows
from troth.ops.short_conv import short_conv
from troth.ops.sigmoid_gate import sigmoid_gate
from troth.weights.source import WeightSource

IGNORED: Final = ("mtp.*", "model.visual.*")
"""A draft head that is loaded is not ignored: ``models/registry.py`` leaves its pattern out then."""
_PREFIXES: Final = ("model.", "model.language_model.")
"""Where the text model's tensors lie: alone, and beside an image tower."""
_DEFAULTS: Final = {"head_dim": 256, "max_position_embeddings": 32768}
_FULL, _LINEAR = "full_attention", "linear_attention"
_STATE_BYTES: Final = 4
"""States are float32 whatever the activations are: a recurrence adds up what rounding does to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """The numbers that define a gated delta layer."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Of one head."""
    value_dim: int
    """Of one head."""
    num_taps: int
    """Of the convolution before the recurrence."""

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def trail_width(self) -> int:
        """Numbers that the recurrence keeps of a draft."""
        return trail_size(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)


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
    layer_types: tuple[str, ...]
    """full_attention or linear_attention."""
    delta: DeltaConfig
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    num_draft_layers: int = 0
    """Layers of the draft head that the checkpoint has."""
    has_own_draft_embedding: bool = False
    loads_draft_head: bool = False

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], path: str) -> Config:
        """Read config.json of model_type qwen3_5_text, or the ``text_config`` in one of qwen3_5."""
        whole = StrictConfig(values, path)
        text = whole.mapping("text_config")
        if text is None:
            return cls._from_text(whole)
        # The image tower is not loaded; the ids say which tokens its outputs would replace.
        whole.finish(
            inert=(
                *("vision_config", "language_model_only", "tie_word_embeddings"),
                *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
            )
        )
        tied = {key: values[key] for key in ("tie_word_embeddings",) if values.get(key) is not None}
        return cls._from_text(StrictConfig({**text, **tied}, f"{path}: text_config"))

    @classmethod
    def _from_text(cls, config: StrictConfig) -> Config:
        config.one_of("hidden_act", ("silu",), "silu")
        config.one_of("attn_output_gate", (True,), True)
        config.one_of("output_gate_type", ("swish",), "swish")
        config.one_of("mamba_ssm_dtype", ("float32",), "float32")
        config.one_of("mlp_only_layers", ([],), [])
        size = dimensions_from_hf(config, _DEFAULTS)
        interval = config.integer("full_attention_interval", 4)
        key_heads, value_heads = (
            config.integer("linear_num_key_heads", 16),
            config.integer("linear_num_value_heads", 32),
        )
        if value_heads % key_heads:
            raise config.error("linear_num_value_heads", f"{value_heads} heads cannot share {key_heads} key heads")
        older_rule = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(size["num_hidden_layers"])]
        parsed = cls(
            **size,
            rope=rope_from_hf(config, size, fraction=0.25),
            layer_types=layer_types(config, older_rule, (_FULL, _LINEAR)),
            delta=DeltaConfig(
                num_key_heads=key_heads,
                num_value_heads=value_heads,
                key_dim=config.integer("linear_key_head_dim", 128),
                value_dim=config.integer("linear_value_head_dim", 128),
                num_taps=config.integer("linear_conv_kernel_dim", 4, least=2),
            ),
            attention_bias=config.flag("attention_bias", False),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            num_draft_layers=config.integer("mtp_num_hidden_layers", 0, least=0),
            has_own_draft_embedding=config.flag("mtp_use_dedicated_embeddings", False),
        )
        config.finish()
        return parsed

    def cache_specs(self, element_bytes: int) -> tuple[CacheSpec, ...]:
        """Blocks for the layers of full attention and of the draft head, a state per row for the delta layers."""
        delta = self.delta
        draft_layers = (self.num_hidden_layers,) if self.loads_draft_head else ()
        groups: tuple[CacheSpec, ...] = (
            AttentionSpec(
                layers=self._layers(_FULL) + draft_layers,
                frontier_width=self.hidden_size if draft_layers else 0,
                num_kv_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
                value_dim=self.head_dim,
                element_bytes=element_bytes,
            ),
            RecurrentSpec(
                layers=self._layers(_LINEAR),
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

    def with_draft_head(self) -> Config:
        """The same, with the draft head loaded and cached."""
        return replace(self, loads_draft_head=True)

    def _layers(self, kind: str) -> tuple[int, ...]:
        return tuple(layer for layer, other in enumerate(self.layer_types) if other == kind)


@dataclass(slots=True)
class GatedAttention:
    """Attention whose output is scaled, value by value, by a sigmoid of the input."""

    layer: int
    qkv: Linear
    gate: Linear
    out: Linear
    num_heads: int
    rotary: RotaryTable
    scale: float
    norms: HeadNorms

    def __call__(self, x_TD: Tensor, batch: Batch, cache: CacheStorage) -> Tensor:
        """As nn.decoder.Attention."""
        tables = batch.groups[cache.group_of[self.layer]]
        kv = cache.kv[self.layer]
        q_THD = self._rotated(self.qkv(x_TD, batch.rows), batch.positions_T, tables.slots_T, kv)
        out_THD = attention(q_THD, kv, tables.block_table_RB, batch.rows, self.scale)
        return self._gated(x_TD, out_THD, batch.rows)

    def write(self, x_TD: Tensor, pairs: Pairs, cache: CacheStorage) -> None:
        """As nn.draft_head.PairAttention."""
        self._rotated(self.qkv(x_TD, pairs.rows), pairs.positions_T, pairs.slots_T, cache.kv[self.layer])

    def look_back(self, x_RD: Tensor, pairs: LastPairs, cache: CacheStorage) -> Tensor:
        """As nn.draft_head.PairAttention."""
        qkv_RE, kv = self.qkv(x_RD, pairs.rows), cache.kv[self.layer]
        self._rotated(qkv_RE, pairs.positions_T, pairs.slots_T, kv)
        q_RHD = self._rotated(qkv_RE, pairs.positions_T, pairs.own_slots_R, kv)
        return self._gated(x_RD, attention(q_RHD, kv, pairs.block_table_RB, pairs.rows, self.scale), pairs.rows)

    def _rotated(self, qkv_TE: Tensor, positions_T: Tensor, slots_T: Tensor, kv: LayerKV) -> Tensor:
        return rotary_kv_write(qkv_TE, self.num_heads, positions_T, self.rotary, self.norms, slots_T, kv)

    def _gated(self, x_TD: Tensor, out_THD: Tensor, rows: Rows) -> Tensor:
        return self.out(sigmoid_gate(out_THD.flatten(1), self.gate(x_TD, rows)), rows)


@dataclass(slots=True)
class DeltaNet:
    """Linear attention by the gated delta rule, behind a short convolution."""

    layer: int
    config: DeltaConfig
    projections: Linear
    """D -> W: queries, keys and values, then the output gate, then what becomes beta and the decay."""
    out: Linear
    conv_KC: Tensor
    decay: Decay
    norm_E: Tensor
    eps: float

    def __call__(self, x_TD: Tensor, batch: Batch, cache: CacheStorage) -> Tensor:
        """As nn.decoder.Attention."""
        heads, value_dim = self.config.num_value_heads, self.config.value_dim
        conv_state, delta_state = cache.states[self.layer]
        conv_trail, delta_trail = cache.trails[self.layer]
        sizes = [self.config.conv_width, heads * value_dim, heads, heads]
        qkv_TC, gate_TF, beta_TH, decay_TH = self.projections(x_TD, batch.rows).split(sizes, dim=-1)
        qkv_TC = short_conv(qkv_TC, self.conv_KC, conv_state, conv_trail, batch.rows)
        out_THE = gated_delta(
            qkv_TC, self.config.num_key_heads, beta_TH, decay_TH, self.decay, delta_state, delta_trail, batch.rows
        )
        out_THE = gated_rms_norm(out_THE, gate_TF.unflatten(-1, (heads, value_dim)), self.norm_E, self.eps)
        return self.out(out_THE.flatten(1), batch.rows)


class Model(Decoder):
    """A Qwen3.5 text model built from its weights.

    Raises:
        ModelLoadError: a tensor is missing or has another shape.
    """

    def __init__(self, config: Config, source: WeightSource, place: Placement) -> None:
        self.config = config
        prefix = next((p for p in _PREFIXES if source.has(f"{p}embed_tokens.weight")), _PREFIXES[0])
        root = LayerSource(source=source, prefix=prefix, dtype=place.dtype, device=place.device)
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
            norm_D=root.norm("norm", config.hidden_size, zero_centred=True),
            head=head,
            eps=config.rms_norm_eps,
            dtype=place.dtype,
            draft_head=_draft_head(config, replace(root, prefix="mtp."), table, rotary)
            if config.loads_draft_head
            else None,
        )


def _draft_head(config: Config, parts: LayerSource, table: LinearWeight, rotary: RotaryTable) -> DraftHead:
    """The head's own tensors lie beside the model's, under ``mtp.``."""
    width, layer = config.hidden_size, parts.below("layers.0.")
    both = parts.stored("fc.weight", (width, 2 * width))
    join_token, join_hidden = (
        stacked([half.contiguous()], None, parts.dtype, parts.device) for half in both.split(width, dim=1)
    )
    return DraftHead(
        embedding=table,
        token_norm_D=parts.norm("pre_fc_norm_embedding", width, zero_centred=True),
        hidden_norm_D=parts.norm("pre_fc_norm_hidden", width, zero_centred=True),
        join_token=join_token,
        join_hidden=join_hidden,
        attention_norm_D=layer.norm("input_layernorm", width, zero_centred=True),
        attention=_gated_attention(config, layer.below("self_attn."), config.num_hidden_layers, rotary),
        mlp_norm_D=layer.norm("post_attention_layernorm", width, zero_centred=True),
        mlp=layer.below("mlp.").gated_mlp(width, config.intermediate_size),
        norm_D=parts.norm("norm", width, zero_centred=True),
        eps=config.rms_norm_eps,
        dtype=parts.dtype,
    )


def _block(config: Config, layers: LayerSource, layer: int, rotary: RotaryTable) -> Block:
    width = config.hidden_size
    return Block(
        attention_norm_D=layers.norm("input_layernorm", width, zero_centred=True),
        attention=_attention(config, layers, layer, rotary),
        mlp_norm_D=layers.norm("post_attention_layernorm", width, zero_centred=True),
        mlp=layers.below("mlp.").gated_mlp(width, config.intermediate_size),
    )


def _attention(config: Config, layers: LayerSource, layer: int, rotary: RotaryTable) -> Attention:
    if config.layer_types[layer] == _LINEAR:
        return _delta_net(config, layers.below("linear_attn."), layer)
    return _gated_attention(config, layers.below("self_attn."), layer, rotary)


def _gated_attention(config: Config, parts: LayerSource, layer: int, rotary: RotaryTable) -> GatedAttention:
    width, heads, head_dim, bias = (
        config.hidden_size,
        config.num_attention_heads,
        config.head_dim,
        config.attention_bias,
    )
    q_rows, kv_rows = heads * head_dim, config.num_key_value_heads * head_dim
    kv = [parts.stored(f"{name}.weight", (kv_rows, width)) for name in ("k_proj", "v_proj")]
    kv_biases = [parts.tensor(f"{name}.bias", (kv_rows,)) for name in ("k_proj", "v_proj")] if bias else []
    # q_proj holds the rows of each head's query, then those of its gate, head by head.
    both = parts.stored("q_proj.weight", (2 * q_rows, width)).unflatten(0, (heads, 2, head_dim))
    query, gate = (both[:, i].flatten(0, 1) for i in range(2))
    both_biases = parts.tensor("q_proj.bias", (2 * q_rows,)).view(heads, 2, head_dim) if bias else None
    query_bias, gate_bias = ([] if both_biases is None else [both_biases[:, i].flatten()] for i in range(2))
    return GatedAttention(
        layer=layer,
        qkv=stacked([query, *kv], [*query_bias, *kv_biases], parts.dtype, parts.device),
        gate=stacked([gate], gate_bias, parts.dtype, parts.device),
        out=parts.linear({"o_proj": width}, q_rows, bias=bias),
        num_heads=heads,
        rotary=rotary,
        scale=head_dim**-0.5,
        norms=HeadNorms(
            q_D=parts.norm("q_norm", head_dim, zero_centred=True),
            k_D=parts.norm("k_norm", head_dim, zero_centred=True),
            eps=config.rms_norm_eps,
        ),
    )


def _delta_net(config: Config, parts: LayerSource, layer: int) -> DeltaNet:
    delta, width = config.delta, config.hidden_size
    heads, value_rows = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    projections = {"in_proj_qkv": delta.conv_width, "in_proj_z": value_rows, "in_proj_b": heads, "in_proj_a": heads}
    taps = parts.tensor("conv1d.weight", (delta.conv_width, 1, delta.num_taps))
    return DeltaNet(
        layer=layer,
        config=delta,
        projections=parts.linear(projections, width),
        out=parts.linear({"out_proj": width}, value_rows),
        conv_KC=taps.squeeze(1).T.contiguous(),
        decay=Decay(parts.tensor("A_log", (heads,)).exp(), parts.tensor("dt_bias", (heads,))),
        norm_E=parts.norm("norm", delta.value_dim),
        eps=config.rms_norm_eps,
    )
