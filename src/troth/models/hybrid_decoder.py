"""Qwen's hybrids as models: from the tensors of a checkpoint to a decoder, and to its draft head.

Serves qwen3_5, qwen3_5_moe and qwen3_next, whose checkpoints differ in how they hold the delta layers' inputs. The
multi-token-prediction head ``mtp.*`` takes no part in the model's own answer: it drafts, and is loaded where the config
says so (``with_draft_head``). Read next: ``nn/delta_net.py``, ``nn/gated_attention.py``, ``nn/sparse_mlp.py``.
Legend: D model width; other letters are those of ``nn/delta_net.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from troth.models.expert_layers import sparse_mlp
from troth.models.family import Placement
from troth.models.hybrid_config import LINEAR, HybridConfig
from troth.nn.decoder import Attention, Block, Decoder
from troth.nn.delta_net import DeltaConfig, DeltaNet
from troth.nn.draft_head import DraftHead
from troth.nn.gated_attention import GatedAttention
from troth.nn.layer_source import LayerSource
from troth.nn.linear import Linear, stacked
from troth.nn.mlp import FeedForward
from troth.nn.rope import rotary_table
from troth.ops.gated_delta import Decay
from troth.ops.linear import LinearWeight
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable
from troth.weights.source import WeightSource

_PREFIXES: Final = ("model.", "model.language_model.")
"""Where the text model's tensors lie: alone, and beside an image tower."""

DeltaInputs = Callable[[DeltaConfig, LayerSource, int], Linear]
"""Reads a delta layer's projections of a model of the given width, D -> W."""


def delta_inputs(delta: DeltaConfig, parts: LayerSource, width: int) -> Linear:
    """Those of Qwen3.5: queries, keys and values in one tensor, gate, beta and decay in one each."""
    heads = delta.num_value_heads
    outputs = {
        "in_proj_qkv": delta.conv_width,
        "in_proj_z": heads * delta.value_dim,
        "in_proj_b": heads,
        "in_proj_a": heads,
    }
    return parts.linear(outputs, width)


class HybridModel(Decoder):
    """A text model of these families built from its weights.

    Raises:
        ModelLoadError: a tensor is missing or has another shape.
    """

    def __init__(
        self, config: HybridConfig, source: WeightSource, place: Placement, inputs: DeltaInputs = delta_inputs
    ) -> None:
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
                _block(config, root.below(f"layers.{layer}."), layer, rotary, inputs)
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


def _draft_head(config: HybridConfig, parts: LayerSource, table: LinearWeight, rotary: RotaryTable) -> DraftHead:
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
        mlp=_feed_forward(config, layer.below("mlp."), has_experts=config.experts is not None),
        norm_D=parts.norm("norm", width, zero_centred=True),
        eps=config.rms_norm_eps,
        dtype=parts.dtype,
    )


def _block(config: HybridConfig, layers: LayerSource, layer: int, rotary: RotaryTable, inputs: DeltaInputs) -> Block:
    width = config.hidden_size
    return Block(
        attention_norm_D=layers.norm("input_layernorm", width, zero_centred=True),
        attention=_attention(config, layers, layer, rotary, inputs),
        mlp_norm_D=layers.norm("post_attention_layernorm", width, zero_centred=True),
        mlp=_feed_forward(config, layers.below("mlp."), has_experts=layer in config.expert_layers),
    )


def _feed_forward(config: HybridConfig, parts: LayerSource, *, has_experts: bool) -> FeedForward:
    if has_experts:
        assert config.experts is not None, config
        return sparse_mlp(parts, config.hidden_size, config.experts)
    return parts.gated_mlp(config.hidden_size, config.dense_size)


def _attention(
    config: HybridConfig, layers: LayerSource, layer: int, rotary: RotaryTable, inputs: DeltaInputs
) -> Attention:
    if config.layer_types[layer] == LINEAR:
        return _delta_net(config, layers.below("linear_attn."), layer, inputs)
    return _gated_attention(config, layers.below("self_attn."), layer, rotary)


def _gated_attention(config: HybridConfig, parts: LayerSource, layer: int, rotary: RotaryTable) -> GatedAttention:
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


def _delta_net(config: HybridConfig, parts: LayerSource, layer: int, inputs: DeltaInputs) -> DeltaNet:
    delta, width = config.delta, config.hidden_size
    heads, value_rows = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    taps = parts.tensor("conv1d.weight", (delta.conv_width, 1, delta.num_taps))
    return DeltaNet(
        layer=layer,
        config=delta,
        projections=inputs(delta, parts, width),
        out=parts.linear({"out_proj": width}, value_rows),
        conv_KC=taps.squeeze(1).T.contiguous(),
        decay=Decay(parts.tensor("A_log", (heads,)).exp(), parts.tensor("dt_bias", (heads,))),
        norm_E=parts.norm("norm", delta.value_dim),
        eps=config.rms_norm_eps,
    )
