"""LFM2: logits of tiny random models in both file formats, feed-forward sizes, layers by list and by index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.cpu.gguf_models import gguf_name, saved_tensors, write
from tests.cpu.tiny_models import (
    CONTEXT,
    DENSE,
    VOCAB,
    Case,
    Session,
    check_bfloat16,
    check_chunks,
    check_mixed_batches,
    check_prefill_and_decode,
    load,
    make_case,
)
from troth.contracts.cache_spec import RecurrentSpec, attention_groups
from troth.errors import ModelLoadError
from troth.models.lfm2 import Config

CONFIGS: dict[str, Any] = {
    "one-full-in-three": transformers.Lfm2Config(
        **DENSE, layer_types=["conv", "full_attention", "conv"], block_multiple_of=32
    ),
    "untied-four-taps-by-index": transformers.Lfm2Config(
        **DENSE,
        tie_word_embeddings=False,
        conv_L_cache=4,
        full_attn_idxs=[0, 2],
        block_ffn_dim_multiplier=1.3,
        block_multiple_of=24,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "conv-only-two-taps": transformers.Lfm2Config(
        **DENSE, layer_types=["conv"] * 3, conv_L_cache=2, block_auto_adjust_ff_dim=False, norm_eps=1e-3
    ),
}
LIMIT = 5e-5
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
KEYS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "context_length": CONTEXT,
    "embedding_length": 64,
    "block_count": 3,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": [0, 2, 0],
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e6,
    "shortconv.l_cache": 3,
}
"""What the converter writes for the first of the configs."""


@pytest.fixture(scope="module", params=CONFIGS, name="case")
def _case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def test_lfm2_prefill_and_decode_give_the_reference_logits(case: Case) -> None:
    check_prefill_and_decode(case, LIMIT)


def test_lfm2_chunks_give_the_reference_logits(case: Case) -> None:
    check_chunks(case, LIMIT)


def test_lfm2_mixed_batches_give_the_reference_logits(case: Case) -> None:
    check_mixed_batches(case, LIMIT)


def test_lfm2_in_bfloat16_is_as_exact_as_the_reference(case: Case) -> None:
    check_bfloat16(case)


def test_lfm2_keeps_float32_states_whatever_it_computes_in(tmp_path: Path) -> None:
    session = Session(load(make_case(CONFIGS["one-full-in-three"], tmp_path).path, torch.bfloat16), torch.bfloat16)
    assert {tensor.dtype for state in session.cache.states.values() for tensor in state} == {torch.float32}
    assert session.cache.kv[1].k_NKDS.dtype == torch.bfloat16


@pytest.mark.parametrize("quantised", [False, True], ids=["f32", "q8_0"])
def test_lfm2_gguf_gives_the_reference_logits(tmp_path: Path, quantised: bool) -> None:
    case = make_case(CONFIGS["one-full-in-three"], tmp_path)
    tensors = {
        gguf_name(name, NAMES): tensor.squeeze(1) if "conv.conv" in name else tensor
        for name, tensor in saved_tensors(tmp_path).items()
    }
    projections = ("_proj.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
    path = write(
        tmp_path / "model.gguf", "lfm2", KEYS, tensors, quantise=lambda name: quantised and name.endswith(projections)
    )
    check_prefill_and_decode(replace(case, path=path), 0.3 if quantised else LIMIT)


def hf(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it, with changes; None removes a key."""
    values = {**CONFIGS["one-full-in-three"].to_dict(), "model_type": "lfm2", **changes}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_bias": True}, "conv_bias: True is not supported"),
        ({"block_use_swiglu": False}, "block_use_swiglu: False is not supported"),
        ({"use_pos_enc": False}, "use_pos_enc: False is not supported"),
        ({"conv_L_cache": 1}, "conv_L_cache: must be an integer of at least 2"),
        ({"conv_dim": 128}, "conv_dim: says 128, but what it repeats is 64"),
        ({"num_heads": 8}, "num_heads: says 8, but what it repeats is 4"),
        ({"theta": 1e4}, "theta: says 10000.0, but what it repeats is 1000000.0"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps: says 1e-06, but what it repeats is 1e-05"),
        ({"layer_types": ["sliding_attention"] * 3}, "'sliding_attention' is not possible here"),
        ({"layer_types": None, "full_attn_idxs": [3]}, r"full_attn_idxs: must be a list of layers below 3, not \[3\]"),
        ({"layer_types": None, "full_attn_idxs": "all"}, "full_attn_idxs: must be a list of layers"),
        ({"num_experts": 32}, "num_experts"),
        ({"quantization": {"bits": 4}}, "quantization"),
    ],
)
def test_lfm2_config_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        Config.from_hf(hf(**changes), "config.json")
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": 2}, "attention.head_count_kv: must list heads .* not 2"),
        ({"attention.head_count_kv": [2, 0, 4]}, "attention.head_count_kv: must list heads .* one number or 0"),
        ({"attention.head_count_kv": [2, 0]}, "attention.head_count_kv: lists 2 layers, but block_count is 3"),
        ({"attention.causal": False}, "attention.causal"),
        ({"attention.sliding_window": 64}, "attention.sliding_window"),
        ({"shortconv.l_cache": None}, "shortconv.l_cache: is missing"),
    ],
)
def test_lfm2_gguf_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        Config.from_gguf({**KEYS, **changes}, "model.gguf")
    assert str(caught.value).startswith("model.gguf: ")


def test_lfm2_config_rotates_by_a_million_when_nothing_is_said() -> None:
    assert Config.from_hf(hf(rope_parameters=None), "config.json").rope.theta == 1e6
    assert Config.from_hf(hf(rope_parameters=None, rope_theta=5e5), "config.json").rope.theta == 5e5


def test_lfm2_config_without_lists_attends_in_every_layer() -> None:
    config = Config.from_hf(hf(layer_types=None), "config.json")
    assert config.layer_types == ("full_attention",) * 3
    assert [spec.layers for spec in config.cache_specs(2)] == [(0, 1, 2)]


PUBLISHED = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
"""Keys as in LFM2 1.2B's config.json."""


def test_lfm2_config_of_the_published_kind_is_read() -> None:
    config = Config.from_hf(PUBLISHED, "config.json")
    assert (config.intermediate_size, config.head_dim, config.rms_norm_eps) == (8192, 64, 1e-5)
    assert (config.rope.theta, config.tie_word_embeddings, config.num_taps) == (1e6, True, 3)
    assert [layer for layer, kind in enumerate(config.layer_types) if kind != "conv"] == [2, 5, 8, 10, 12, 14]


def test_lfm2_config_of_the_newer_published_kind_is_the_same() -> None:
    """Keys as in LFM2.5's: layers by name, one feed-forward size, the rotation in an object of its own."""
    older = Config.from_hf(PUBLISHED, "config.json")
    newer = {key: value for key, value in PUBLISHED.items() if key not in ("block_ff_dim", "rope_theta")}
    newer |= {
        "full_attn_idxs": None,
        "intermediate_size": 12288,
        "layer_types": list(older.layer_types),
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "theta": 1000000.0,
        "tie_embedding": True,
    }
    assert Config.from_hf(newer, "config.json") == older


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"intermediate_size": 8192}, 8192),  # block_ff_dim wins
        ({"block_ff_dim": 1000}, 768),
        ({"block_ff_dim": 1000, "block_multiple_of": 64}, 704),
        ({"block_ff_dim": 1000, "block_multiple_of": 48, "block_ffn_dim_multiplier": 1.5}, 1008),
        ({"block_ff_dim": 1000, "block_auto_adjust_ff_dim": False}, 1000),
    ],
)
def test_lfm2_config_adjusts_the_feed_forward_size(changes: dict[str, Any], size: int) -> None:
    assert Config.from_hf({**PUBLISHED, **changes}, "config.json").intermediate_size == size


def test_lfm2_output_layer_is_the_embedding_where_either_key_says_so() -> None:
    assert not Config.from_hf({**PUBLISHED, "tie_embedding": False}, "config.json").tie_word_embeddings
    assert not Config.from_hf({**PUBLISHED, "tie_word_embeddings": False}, "config.json").tie_word_embeddings
    both = {**PUBLISHED, "tie_embedding": True, "tie_word_embeddings": False}
    assert Config.from_hf(both, "config.json").tie_word_embeddings


def test_lfm2_caches_are_blocks_for_attention_and_the_last_inputs_for_convolutions() -> None:
    config = Config.from_hf(PUBLISHED, "config.json")
    (full,) = attention_groups(config.cache_specs(2))
    assert (full.layers, full.window, full.head_dim, full.element_bytes) == ((2, 5, 8, 10, 12, 14), None, 64, 2)
    (state,) = (spec for spec in config.cache_specs(2) if isinstance(spec, RecurrentSpec))
    assert len(state.layers) == 10
    assert state.state_bytes == 10 * 2 * 2048 * 4
    assert state.trail_bytes == 10 * 8 * 2048 * 4
