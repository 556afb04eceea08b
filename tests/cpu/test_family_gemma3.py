"""Gemma 3: logits of tiny random models in both file formats, alone and beside an image tower, and strict configs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from tests import model_files
from tests.cpu import real_models
from tests.cpu.gguf_models import GEMMA_NAMES, gguf_name, keys_of, saved_tensors, write
from tests.cpu.real_models import Golden
from tests.cpu.tiny_models import (
    DENSE,
    VOCAB,
    Case,
    check_bfloat16,
    check_chunks,
    check_mixed_batches,
    check_prefill_and_decode,
    load,
    make_case,
    random_model,
    save,
    worst,
)
from troth.contracts.cache_spec import attention_groups
from troth.errors import ModelLoadError
from troth.models.gemma3 import Config

SMALL = {**DENSE, "head_dim": 32, "query_pre_attn_scalar": 24}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CONFIGS: dict[str, Any] = {
    "one-full-in-six": transformers.Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 7}, sliding_window=20),
    "scaled-capped-biased": transformers.Gemma3TextConfig(
        **SMALL,
        sliding_window=17,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=ROPES,
        final_logit_softcapping=2.0,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "window-shorter-than-a-block": transformers.Gemma3TextConfig(
        **{**SMALL, "num_key_value_heads": 1, "num_hidden_layers": 6}, sliding_window=5
    ),
}


@pytest.fixture(scope="module", params=CONFIGS, name="case")
def _case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))


def test_gemma3_prefill_and_decode_give_the_reference_logits(case: Case) -> None:
    check_prefill_and_decode(case, 5e-5)


def test_gemma3_chunks_give_the_reference_logits(case: Case) -> None:
    check_chunks(case, 5e-5)


def test_gemma3_mixed_batches_give_the_reference_logits(case: Case) -> None:
    check_mixed_batches(case, 5e-5)


def test_gemma3_in_bfloat16_is_as_exact_as_the_reference(case: Case) -> None:
    check_bfloat16(case)


def test_gemma3_rounds_the_factor_of_its_embeddings_as_the_reference_does(tmp_path: Path) -> None:
    """sqrt(72) is 8.485, in bfloat16 8.5."""
    config = transformers.Gemma3TextConfig(**{**SMALL, "hidden_size": 72, "num_hidden_layers": 1}, sliding_window=20)
    model = random_model(config)
    path = save(model, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = float(model.model.embed_tokens.embed_scale.to(dtype))
        assert load(path, dtype)._embedding_scale == wanted  # type: ignore[attr-defined]
    assert wanted == 8.5


def test_gemma3_gguf_with_norms_that_include_one_gives_the_reference_logits(tmp_path: Path) -> None:
    """The file says neither which layers slide nor the local theta nor the scale: one in six, 10000, the head size."""
    sizes = {**SMALL, "num_hidden_layers": 7, "query_pre_attn_scalar": 32}
    scaled = {**ROPES["full_attention"], "factor": 4.0}
    config = transformers.Gemma3TextConfig(
        **sizes, sliding_window=20, rope_parameters={**ROPES, "full_attention": scaled}
    )
    case = make_case(config, tmp_path)
    keys = keys_of(config, 32) | {
        "attention.sliding_window": 20,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
    }
    tensors = {
        gguf_name(name, GEMMA_NAMES): tensor + np.float32("norm" in name)
        for name, tensor in saved_tensors(tmp_path).items()
    }
    path = write(tmp_path / "model.gguf", "gemma3", keys, tensors)
    check_prefill_and_decode(replace(case, path=path), 5e-5)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_beside_an_image_tower_gives_the_same_logits(prefix: str, tmp_path: Path) -> None:
    """The text config lies inside, the tensors below another prefix, and the tower's are left alone."""
    text = CONFIGS["one-full-in-six"]
    case = make_case(text, tmp_path)
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config={**tower, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
    )
    folder = tmp_path / "whole"
    transformers.Gemma3ForConditionalGeneration(whole).save_pretrained(folder)
    stored = saved_tensors(folder)
    for name, tensor in saved_tensors(tmp_path).items():
        at = name.replace("model.", "language_model.model.", 1)
        assert at in stored
        stored.pop(at)
        stored[name.replace("model.", prefix, 1)] = tensor
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    check_prefill_and_decode(replace(case, path=folder), 5e-5)


def test_gemma3_refuses_tensors_of_a_tower_it_does_not_know(tmp_path: Path) -> None:
    make_case(CONFIGS["one-full-in-six"], tmp_path)
    tensors = saved_tensors(tmp_path) | {"audio_tower.conv.weight": np.zeros(4, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"1 tensors have no place in this model: audio_tower\.conv\.weight"):
        load(tmp_path)


def hf(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it, with changes; None removes a key."""
    values = {**CONFIGS["one-full-in-six"].to_dict(), "model_type": "gemma3_text", **changes}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation: 'silu' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: True is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: is Gemma 2's"),
        ({"altup_num_inputs": 4}, "altup_num_inputs"),
        ({"layer_types": ["linear_attention"] * 7}, "'linear_attention' is not possible here"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters: must be all there is and name layer types"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_parameters: must be all there is"),
        ({"sliding_window": None}, "sliding_window: is missing"),
    ],
)
def test_gemma3_config_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        Config.from_hf(hf(**changes), "config.json")
    assert str(caught.value).startswith("config.json: ")


def test_gemma3_config_refuses_unknown_keys_beside_the_text_config() -> None:
    with pytest.raises(ModelLoadError, match="audio_config"):
        Config.from_hf({"model_type": "gemma3", "text_config": hf(), "audio_config": {}}, "config.json")


def test_gemma3_config_means_the_same_in_its_older_spelling() -> None:
    newer = hf(
        rope_parameters=ROPES, layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"]
    )
    older = {key: value for key, value in newer.items() if key not in ("rope_parameters", "layer_types")}
    older |= {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    assert Config.from_hf(older, "config.json") == Config.from_hf(newer, "config.json")


def test_gemma3_config_of_the_published_kind_is_read() -> None:
    """Keys as in Gemma 3 4B's config.json, which leaves most of them to the reference's defaults."""
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    config = Config.from_hf(values, "config.json")
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (262208, 256, 4)
    assert (config.rope_global.theta, config.rope_global.values) == (1e6, {"factor": 8.0})
    assert (config.rope_local.theta, config.rope_local.scaling) == (1e4, "default")
    assert config.tie_word_embeddings
    full, window = attention_groups(config.cache_specs(2))
    assert (full.layers, full.window) == ((5, 11, 17, 23, 29), None)
    assert (len(window.layers), window.window) == (29, 1024)


@pytest.mark.parametrize(("num_layers", "scalar"), [(48, 256), (62, 336)], ids=["12b", "27b"])
def test_gemma3_gguf_config_scales_scores_by_the_head_size_but_in_the_largest_model(
    num_layers: int, scalar: int
) -> None:
    sizes = {**SMALL, "hidden_size": 5376, "num_attention_heads": 16, "num_hidden_layers": num_layers}
    keys = keys_of(transformers.Gemma3TextConfig(**sizes), 256) | {"attention.sliding_window": 1024}
    assert Config.from_gguf(keys, "model.gguf").query_pre_attn_scalar == scalar


def test_gemma3_gguf_config_refuses_keys_it_does_not_know() -> None:
    keys = keys_of(CONFIGS["one-full-in-six"], 32) | {"attention.sliding_window": 20, "attention.causal": False}
    with pytest.raises(ModelLoadError, match=r"attention\.causal"):
        Config.from_gguf(keys, "model.gguf")


@pytest.mark.e2e
def test_gemma3_270m_gives_the_reference_and_golden_choices_and_tokens() -> None:
    path = model_files.gemma3_270m()
    golden = Golden("gemma-3-270m-q4_k_m")
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        query_pre_attn_scalar=256,
        sliding_window=512,
    )
    reference = real_models.reference_of_gguf(path, config, zero_centred=True)
    model = load(path)
    logits = golden.logits(model)
    wanted = [real_models.reference_logits(reference, ids) for ids in golden.fed]
    real_models.check_rounded(logits, wanted)
    with real_models.exact_products():
        assert max(map(worst, golden.logits(load(path)), wanted)) < 5e-4
    theirs, ours = golden.choices(logits)
    assert len(theirs) == 83
    assert ours == theirs
    # 0.264 for us and for the reference alike, most of it in the tail behind one token of 97 %. The golden engine
    # rounds activations to 8 bits: run again with its float32 cache or other attention kernel, it is 0.16 to 0.19 from
    # its own file.
    assert golden.mean_difference(logits) < 0.3
    assert golden.mean_difference(logits) == pytest.approx(golden.mean_difference(wanted), abs=1e-3)
    answers = real_models.greedy(model, golden.prompts, 12)
    for prompt, answer in zip(golden.prompts, answers, strict=True):
        assert len(answer.token_ids) == 12
        real_models.check_greedy(reference, prompt, answer.token_ids)
