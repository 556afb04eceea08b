"""Qwen3-Next: logits of tiny random hybrids with experts, what configs may say, and what files must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from tests.cpu.tiny_models import (
    EXPERTS,
    HYBRID,
    Case,
    check_bfloat16,
    check_chunks,
    check_mixed_batches,
    check_prefill_and_decode,
    load,
    make_case,
    random_model,
    save,
)
from troth.artifact.resolve import resolve
from troth.contracts.cache_spec import RecurrentSpec, attention_groups
from troth.errors import ModelLoadError
from troth.models.qwen3_next import Config
from troth.models.registry import recognise

SIZES: dict[str, Any] = {**HYBRID, **EXPERTS}
CONFIGS: dict[str, Any] = {
    "experts-everywhere": transformers.Qwen3NextConfig(**SIZES),
    "every-second-layer-shares-of-all": transformers.Qwen3NextConfig(
        **{**SIZES, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        attention_bias=True,
        tie_word_embeddings=True,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    ),
}
LIMIT = 5e-4
"""As of qwen3_5: the reference in float32 is up to 6e-5 from itself in float64."""


@pytest.fixture(scope="module", params=CONFIGS, name="case")
def _case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def test_qwen3_next_prefill_and_decode_give_the_reference_logits(case: Case) -> None:
    check_prefill_and_decode(case, LIMIT)


def test_qwen3_next_chunks_give_the_reference_logits(case: Case) -> None:
    check_chunks(case, LIMIT)


def test_qwen3_next_mixed_batches_give_the_reference_logits(case: Case) -> None:
    check_mixed_batches(case, LIMIT)


def test_qwen3_next_in_bfloat16_is_as_exact_as_the_reference(tmp_path: Path) -> None:
    """Every expert is chosen: among fewer, rounding makes other choices here than there, and either is as far off."""
    check_bfloat16(make_case(transformers.Qwen3NextConfig(**{**SIZES, "num_experts_per_tok": 6}), tmp_path))


def hf(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it, with changes; None removes a key."""
    values = {**CONFIGS["experts-everywhere"].to_dict(), "model_type": "qwen3_next", **changes}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: a token cannot take 7 of 6 experts"),
        ({"num_experts": 0}, "num_experts: must be an integer of at least 1"),
        ({"mlp_only_layers": ["0"]}, r"mlp_only_layers: must be a list of layers, not \['0'\]"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size: is missing"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: must be an integer of at least 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: must be true or false, not 1"),
        ({"use_sliding_window": True}, "use_sliding_window: True is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' is not possible here"),
        ({"n_group": 8}, "could change its results: n_group"),
    ],
)
def test_qwen3_next_config_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        Config.from_hf(hf(**changes), "config.json")
    assert str(caught.value).startswith("config.json: ")


def test_qwen3_next_config_of_the_published_kind_is_read() -> None:
    """Keys as in the config.json of the published 80B models."""
    published = {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config = Config.from_hf(published, "config.json")
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.routing.num_chosen) == (512, 10)
    assert config.expert_layers == frozenset(range(48))
    assert (config.rope.rotary_dim, config.rope.theta, config.delta.conv_width) == (64, 1e7, 8192)
    (full,) = attention_groups(config.cache_specs(2))
    assert full.layers == tuple(range(3, 48, 4))
    (state,) = (spec for spec in config.cache_specs(2) if isinstance(spec, RecurrentSpec))
    assert state.state_bytes == 36 * 4 * (3 * 8192 + 32 * 128 * 128)
    # Of a token, ten copies of it with what ten experts make of each, and what the shared one makes.
    assert config.intermediate_size == 10 * (2048 + 512) + 512


@pytest.fixture(scope="module", name="stored")
def _stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(CONFIGS["experts-everywhere"]), tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize(
    ("missing", "added", "message"),
    [
        ("layers.1.mlp.experts.5.up_proj.weight", None, "experts.5.up_proj.weight: the model needs this tensor"),
        ("layers.1.mlp.shared_expert_gate.weight", None, "shared_expert_gate.weight: the model needs this tensor"),
        ("layers.0.linear_attn.in_proj_ba.weight", None, "in_proj_ba.weight: the model needs this tensor"),
        (None, "layers.1.mlp.experts.6.up_proj.weight", "1 tensors have no place in this model: .*experts.6.up_proj"),
        (None, "layers.1.mlp.gate.e_score_correction_bias", "1 tensors have no place in this model: .*correction_bias"),
    ],
)
def test_qwen3_next_refuses_by_name_what_is_missing_or_has_no_place(
    stored: Path, tmp_path: Path, missing: str | None, added: str | None, message: str
) -> None:
    tensors = safetensors.torch.load_file(stored / "model.safetensors")
    if missing is not None:
        del tensors[f"model.{missing}"]
    if added is not None:
        tensors[f"model.{added}"] = torch.zeros(3)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((stored / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_qwen3_next_leaves_a_draft_head_alone_and_says_why(stored: Path, tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(stored / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.full((64, 128), torch.nan)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((stored / "config.json").read_text())
    assert load(tmp_path).draft_head is None
    said = recognise(resolve(tmp_path)).draft_head_refusal
    assert said == "configs of its family do not say which draft head the checkpoint has"
