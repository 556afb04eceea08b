"""Qwen3: logits of tiny random models in both file formats, head norms, windows by layer, strict configs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.cpu.gguf_models import gguf_name, keys_of, saved_tensors, write
from tests.cpu.tiny_models import (
    DENSE,
    Case,
    check_bfloat16,
    check_chunks,
    check_mixed_batches,
    check_prefill_and_decode,
    make_case,
)
from troth.errors import ModelLoadError
from troth.models.qwen3 import Config

HEADS_OF_32 = {**DENSE, "head_dim": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, Any] = {
    "qwen3": transformers.Qwen3Config(**HEADS_OF_32),
    "tied-biased-one-kv-head": transformers.Qwen3Config(
        **{**HEADS_OF_32, "num_key_value_heads": 1}, attention_bias=True, tie_word_embeddings=True
    ),
    "as-many-kv-heads": transformers.Qwen3Config(**{**HEADS_OF_32, "num_key_value_heads": 4}, rms_norm_eps=1e-3),
    "yarn": transformers.Qwen3Config(**HEADS_OF_32, rope_parameters=YARN),
    "windows-from-layer-2": transformers.Qwen3Config(
        **HEADS_OF_32, use_sliding_window=True, sliding_window=17, max_window_layers=2
    ),
}


@pytest.fixture(scope="module", params=CONFIGS, name="case")
def _case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def test_qwen3_prefill_and_decode_give_the_reference_logits(case: Case) -> None:
    check_prefill_and_decode(case, 5e-5)


def test_qwen3_chunks_give_the_reference_logits(case: Case) -> None:
    check_chunks(case, 5e-5)


def test_qwen3_mixed_batches_give_the_reference_logits(case: Case) -> None:
    check_mixed_batches(case, 5e-5)


def test_qwen3_in_bfloat16_is_as_exact_as_the_reference(case: Case) -> None:
    check_bfloat16(case)


def test_qwen3_gguf_gives_the_reference_logits(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    case = make_case(config, tmp_path)
    keys = keys_of(config, 32) | {"rope.freq_base": 10000.0}
    tensors = {gguf_name(name): tensor for name, tensor in saved_tensors(tmp_path).items()}
    path = write(tmp_path / "model.gguf", "qwen3", keys, tensors)
    check_prefill_and_decode(replace(case, path=path), 5e-5)


def hf(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it, with changes; None removes a key."""
    values = {**CONFIGS["qwen3"].to_dict(), "model_type": "qwen3", **changes}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"num_experts": 128}, "num_experts"),
        ({"layer_types": ["sliding_attention"] * 3}, "'sliding_attention' is not possible here"),
        ({"layer_types": "full_attention"}, "layer_types: must be a list of strings"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "rope scaling 'yarn' lacks 'factor'"),
    ],
)
def test_qwen3_config_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        Config.from_hf(hf(**changes), "config.json")
    assert str(caught.value).startswith("config.json: ")


def test_qwen3_config_of_the_published_kind_is_read() -> None:
    """Keys as in Qwen3 0.6B's config.json, with the scaling its card recommends for long contexts."""
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config = Config.from_hf(values, "config.json")
    assert (config.head_dim, config.rope.theta, config.rope.scaling) == (128, 1e6, "yarn")
    assert config.rope.values == {"factor": 4.0, "original_max_position_embeddings": 32768}
    assert config.cache_specs(2)[0].bytes_per_block == 16 * 8 * 256 * 2 * 28  # type: ignore[union-attr]
