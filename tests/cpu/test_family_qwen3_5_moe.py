"""Qwen3.5 with experts: logits of tiny random hybrids, of experts one by one and of all in two tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import transformers

from tests.cpu.gguf_models import saved_tensors
from tests.cpu.tiny_models import (
    EXPERTS,
    HYBRID,
    Case,
    check_bfloat16,
    check_chunks,
    check_mixed_batches,
    check_prefill_and_decode,
    make_case,
)
from troth.artifact.resolve import resolve
from troth.config.facts import MachineFacts
from troth.config.options import EngineOptions, ModelOptions
from troth.errors import ModelLoadError
from troth.models.qwen3_5_moe import Config
from troth.run.planned import plan_model

SIZES: dict[str, Any] = {key: value for key, value in HYBRID.items() if key != "intermediate_size"} | EXPERTS
CONFIG: Any = transformers.AutoConfig.for_model("qwen3_5_moe_text", **SIZES)
LIMIT = 5e-4
"""As of qwen3_5: the reference in float32 is up to 6e-5 from itself in float64."""


@pytest.fixture(scope="module", name="case")
def _case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(CONFIG, tmp_path_factory.mktemp("text"))


def test_qwen3_5_moe_prefill_and_decode_give_the_reference_logits(case: Case) -> None:
    check_prefill_and_decode(case, LIMIT)


def test_qwen3_5_moe_chunks_give_the_reference_logits(case: Case) -> None:
    check_chunks(case, LIMIT)


def test_qwen3_5_moe_mixed_batches_give_the_reference_logits(case: Case) -> None:
    check_mixed_batches(case, LIMIT)


def test_qwen3_5_moe_in_bfloat16_is_as_exact_as_the_reference(tmp_path: Path) -> None:
    """Every expert is chosen: among fewer, rounding makes other choices here than there, and either is as far off."""
    config: Any = transformers.AutoConfig.for_model("qwen3_5_moe_text", **{**SIZES, "num_experts_per_tok": 6})
    check_bfloat16(make_case(config, tmp_path))


def test_qwen3_5_moe_of_experts_in_two_tensors_beside_an_image_tower_gives_the_same_logits(
    case: Case, tmp_path: Path
) -> None:
    """As published; transformers itself saves experts one by one."""
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    whole = transformers.Qwen3_5MoeConfig(
        text_config=CONFIG.to_dict(), vision_config={**tower, "num_position_embeddings": 16}
    )
    transformers.Qwen3_5MoeForConditionalGeneration(whole).save_pretrained(tmp_path)
    tower_only = {name: tensor for name, tensor in saved_tensors(tmp_path).items() if name.startswith("model.visual.")}
    text = {name.replace("model.", "model.language_model.", 1): one for name, one in saved_tensors(case.path).items()}
    for layer in range(CONFIG.num_hidden_layers):
        at = f"model.language_model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([text.pop(f"{at}{expert}.{part}_proj.weight") for expert in range(CONFIG.num_experts)])
            for part in ("gate", "up", "down")
        )
        text |= {f"{at}gate_up_proj": np.concatenate((gate, up), axis=1), f"{at}down_proj": down}
    stored = tower_only | text
    stored["mtp.fc.weight"] = np.full((64, 128), np.nan, np.float32)
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    check_prefill_and_decode(replace(case, path=tmp_path), LIMIT)


def test_qwen3_5_moe_takes_memory_for_every_expert(case: Case) -> None:
    """From headers; tokens take a few of them, but nobody knows which."""
    facts = MachineFacts(num_cores=1, total_bytes=8 * 2**30, available_bytes=4 * 2**30, gpus=())
    model = ModelOptions(model=str(case.path), dtype="float32")
    plan = plan_model(resolve(case.path), model, EngineOptions(max_rows=2, providers=("torch",)), facts).plan
    assert plan.weights_bytes == sum(tensor.nbytes for tensor in saved_tensors(case.path).values())
    assert plan.fits


def hf(**changes: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it, with changes; None removes a key."""
    values = {**CONFIG.to_dict(), "model_type": "qwen3_5_moe_text", **changes}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob: False is not supported"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "could change its results: decoder_sparse_step"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: a token cannot take 7 of 6 experts"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: must be an integer of at least 1"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads: 4 heads cannot share 3 key heads"),
    ],
)
def test_qwen3_5_moe_config_refuses_by_name_what_it_does_not_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Config.from_hf(hf(**changes), "config.json")


def test_qwen3_5_moe_config_beside_an_image_tower_is_read_with_its_draft_head() -> None:
    text = hf(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, mamba_ssm_dtype="float32")
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    config = Config.from_hf(whole, "config.json")
    assert config.tie_word_embeddings
    assert config.expert_layers == {0, 1, 2, 3}
    assert config.draft_head_refusal is None
    assert Config.from_hf(hf(), "config.json").draft_head_refusal == "the checkpoint has no draft head"
    with pytest.raises(ModelLoadError, match="audio_config"):
        Config.from_hf({**whole, "audio_config": {}}, "config.json")
