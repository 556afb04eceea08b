"""Qwen2: logits of tiny random models in both file formats, windows by layer, strict configs."""

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
from troth.contracts.cache_spec import attention_groups
from troth.errors import ModelLoadError
from troth.models.qwen2 import Config

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, Any] = {
    "qwen2": transformers.Qwen2Config(**DENSE),
    "tied-one-kv-head": transformers.Qwen2Config(**{**DENSE, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "yarn": transformers.Qwen2Config(**DENSE, rope_parameters=YARN),
    "windows-from-layer-1": transformers.Qwen2Config(
        **DENSE, use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "windows-listed": transformers.Qwen2Config(
        **DENSE,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


@pytest.fixture(scope="module", params=CONFIGS, name="case")
def _case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def test_qwen2_prefill_and_decode_give_the_reference_logits(case: Case) -> None:
    check_prefill_and_decode(case, 5e-5)


def test_qwen2_chunks_give_the_reference_logits(case: Case) -> None:
    check_chunks(case, 5e-5)


def test_qwen2_mixed_batches_give_the_reference_logits(case: Case) -> None:
    check_mixed_batches(case, 5e-5)


def test_qwen2_in_bfloat16_is_as_exact_as_the_reference(case: Case) -> None:
    check_bfloat16(case)


@pytest.mark.parametrize("name", ["qwen2", "tied-one-kv-head"])
def test_qwen2_gguf_gives_the_reference_logits(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    case = make_case(config, tmp_path)
    keys = keys_of(config, 16) | {"rope.freq_base": 10000.0}
    tensors = {gguf_name(name): tensor for name, tensor in saved_tensors(tmp_path).items()}
    path = write(tmp_path / "model.gguf", "qwen2", keys, tensors)
    check_prefill_and_decode(replace(case, path=path), 5e-5)


def hf(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it, with changes; None removes a key."""
    values = {**CONFIGS["qwen2"].to_dict(), "layer_types": None, "model_type": "qwen2", **changes}
    return {key: value for key, value in values.items() if value is not None}


SLIDING = {"use_sliding_window": True, "sliding_window": 20}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 20, "max_window_layers": 0}, (None, None, None)),
        (SLIDING, (None, None, None)),
        ({**SLIDING, "max_window_layers": 1}, (None, 20, 20)),
        ({**SLIDING, "max_window_layers": 0}, (20, 20, 20)),
        ({**SLIDING, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, (20, None, None)),
    ],
    ids=["switched-off", "from-layer-28", "from-layer-1", "all", "listed"],
)
def test_qwen2_config_gives_each_layer_its_window(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = Config.from_hf(hf(**changes), "config.json")
    assert config.windows == windows
    groups = attention_groups(config.cache_specs(2))
    assert {layer: group.window for group in groups for layer in group.layers} == dict(enumerate(windows))
    assert len(groups) == len(set(windows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"use_mrope": True}, "use_mrope"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "'sliding_attention' is not possible",
        ),
        ({**SLIDING, "layer_types": ["full_attention"]}, "layer_types: lists 1 layers, but the model has 3"),
        ({**SLIDING, "layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not possible here"),
        ({**SLIDING, "max_window_layers": 0, "sliding_window": None}, "sliding_window: is missing"),
        ({"rope_parameters": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "'mrope' is not supported"),
    ],
)
def test_qwen2_config_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        Config.from_hf(hf(**changes), "config.json")
    assert str(caught.value).startswith("config.json: ")


def test_qwen2_config_of_the_published_kind_is_read() -> None:
    """Keys as in Qwen2.5 7B Instruct's config.json."""
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 152064,
    }
    config = Config.from_hf(values, "config.json")
    assert (config.head_dim, config.rope.theta, set(config.windows)) == (128, 1e6, {None})
