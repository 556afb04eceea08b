"""Qwen3.5: logits of tiny random hybrids, alone and beside an image tower and a draft head; a trained one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from tests.cpu import real_models
from tests.cpu.gguf_models import saved_tensors
from tests.cpu.tiny_models import (
    HYBRID,
    Case,
    Session,
    check_bfloat16,
    check_chunks,
    check_mixed_batches,
    check_prefill_and_decode,
    load,
    make_case,
)
from tests.shared_data import shared
from troth.contracts.cache_spec import RecurrentSpec, attention_groups
from troth.errors import ModelLoadError
from troth.models.qwen3_5 import Config

ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
CONFIGS: dict[str, Any] = {
    "one-full-in-four": transformers.Qwen3_5TextConfig(**HYBRID, rope_parameters=ROPE),
    "tied-biased-three-taps": transformers.Qwen3_5TextConfig(
        **{**HYBRID, "linear_num_value_heads": 2},
        attention_bias=True,
        tie_word_embeddings=True,
        linear_conv_kernel_dim=3,
        layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
    ),
    "delta-only": transformers.Qwen3_5TextConfig(**HYBRID, layer_types=["linear_attention"] * 4),
}
LIMIT = 5e-4
"""Random gates make these models sensitive: the reference in float32 is up to 7e-5 from itself in float64."""


@pytest.fixture(scope="module", params=CONFIGS, name="case")
def _case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def test_qwen3_5_prefill_and_decode_give_the_reference_logits(case: Case) -> None:
    check_prefill_and_decode(case, LIMIT)


def test_qwen3_5_chunks_give_the_reference_logits(case: Case) -> None:
    check_chunks(case, LIMIT)


def test_qwen3_5_mixed_batches_give_the_reference_logits(case: Case) -> None:
    check_mixed_batches(case, LIMIT)


def test_qwen3_5_in_bfloat16_is_as_exact_as_the_reference(case: Case) -> None:
    check_bfloat16(case)


def test_qwen3_5_keeps_float32_states_whatever_it_computes_in(tmp_path: Path) -> None:
    session = Session(load(make_case(CONFIGS["one-full-in-four"], tmp_path).path, torch.bfloat16), torch.bfloat16)
    assert {tensor.dtype for state in session.cache.states.values() for tensor in state} == {torch.float32}
    assert session.cache.kv[3].k_NKDS.dtype == torch.bfloat16


def test_qwen3_5_beside_an_image_tower_and_a_draft_head_gives_the_same_logits(tmp_path: Path) -> None:
    text = CONFIGS["one-full-in-four"]
    case = make_case(text, tmp_path)
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    whole = transformers.Qwen3_5Config(
        text_config=text.to_dict(), vision_config={**tower, "num_position_embeddings": 16}
    )
    folder = tmp_path / "whole"
    transformers.Qwen3_5ForConditionalGeneration(whole).save_pretrained(folder)
    stored = saved_tensors(folder)
    for name, tensor in saved_tensors(tmp_path).items():
        at = name.replace("model.", "model.language_model.", 1)
        assert at in stored
        stored[at] = tensor
    stored["mtp.fc.weight"] = np.full((64, 128), np.nan, np.float32)
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    check_prefill_and_decode(replace(case, path=folder), LIMIT)


def hf(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it, with changes; None removes a key."""
    values = {**CONFIGS["one-full-in-four"].to_dict(), "model_type": "qwen3_5_text", **changes}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate: False is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: 'bfloat16' is not supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid' is not supported"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"num_experts": 512}, "num_experts"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads: 4 heads cannot share 3 key heads"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' is not possible here"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: must be an integer of at least 2"),
        ({"head_dim": 34}, "rotary size must be even and at least 2, not 17"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": "half"}},
            "above 0 and at most 1, not 'half'",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 2}}, "above 0 and at most 1, not 2"),
    ],
)
def test_qwen3_5_config_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        Config.from_hf(hf(**changes), "config.json")
    assert str(caught.value).startswith("config.json: ")


def test_qwen3_5_config_refuses_unknown_keys_beside_the_text_config() -> None:
    with pytest.raises(ModelLoadError, match="audio_config"):
        Config.from_hf({"model_type": "qwen3_5", "text_config": hf(), "audio_config": {}}, "config.json")


def test_qwen3_5_config_lists_its_layers_by_interval_when_there_is_no_list() -> None:
    config = Config.from_hf(hf(layer_types=None, full_attention_interval=2), "config.json")
    assert config.layer_types == ("linear_attention", "full_attention") * 2


def test_qwen3_5_config_of_the_published_kind_is_read() -> None:
    """Keys as in the config.json of the published 27B models."""
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    }
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "language_model_only": False,
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": False,
        "transformers_version": "5.2.0",
        "video_token_id": 248057,
        "vision_config": {"depth": 27, "model_type": "qwen3_5"},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }
    config = Config.from_hf(whole, "config.json")
    assert (config.rope.rotary_dim, config.rope.theta, config.delta.conv_width) == (64, 1e7, 10240)
    assert config.layer_types.count("full_attention") == 16


def test_qwen3_5_caches_are_blocks_for_attention_and_a_state_for_delta_layers() -> None:
    config = Config.from_hf(hf(), "config.json")
    (full,) = attention_groups(config.cache_specs(2))
    assert (full.layers, full.window, full.head_dim, full.element_bytes) == ((3,), None, 32, 2)
    (state,) = (spec for spec in config.cache_specs(2) if isinstance(spec, RecurrentSpec))
    assert state.layers == (0, 1, 2)
    # Three remembered inputs of 2 * 2 * 16 + 4 * 24 channels, and 4 matrices of 16 by 24, float32.
    assert state.state_bytes == 3 * 4 * (3 * 160 + 4 * 16 * 24)


def test_qwen3_5_config_rotates_a_quarter_of_each_head_when_nothing_is_said() -> None:
    config = Config.from_hf(hf(rope_parameters=None), "config.json")
    assert (config.rope.rotary_dim, config.rope.theta) == (8, 1e4)
    assert Config.from_hf(hf(rope_parameters=None, partial_rotary_factor=0.5), "config.json").rope.rotary_dim == 16


@pytest.mark.e2e
def test_troth_tiny_hybrid_decoded_in_batches_gives_its_golden_tokens() -> None:
    folder = shared("troth-tiny-hybrid")
    golden = json.loads((folder / "golden.json").read_text())
    prompts = golden["prompts"]
    answers = real_models.greedy(
        load(folder, context_tokens=2048),
        [prompt["prompt_ids"] for prompt in prompts],
        64,
        eos_ids=frozenset(golden["eos_token_ids"]),
        max_rows=8,
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        end = 64 if prompt["stop_at"] is None else prompt["stop_at"] + 1
        assert answer.token_ids == prompt["greedy_ids"][:end], prompt["id"]
        for entry, wanted in zip(answer.logprobs, prompt["top5_logprobs"], strict=False):
            assert entry.top_ids[0] == wanted[0][0]
            assert entry.top_logprobs == pytest.approx([value for _, value in wanted], abs=2e-4)
