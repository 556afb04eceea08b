"""Weights that are rounded to fp8 at load: which, how they multiply, and where that is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cpu.op_cases import CPU, inputs
from tests.cpu.test_laws import FAMILIES
from tests.cpu.tiny_models import CONTEXT, random_model, save
from troth.artifact.ggml_types import GgmlType
from troth.artifact.resolve import resolve
from troth.config.facts import GpuFacts, MachineFacts
from troth.config.options import EngineOptions, ModelOptions
from troth.errors import OptionError
from troth.models.family import Placement
from troth.models.registry import recognise
from troth.ops.linear import RawLinearWeight, linear, pack, random_weight
from troth.run.planned import namespace_of, plan_model
from troth.weights.fp8 import Fp8Tensor, fp8_bytes, fp8_refusal, is_rounded

H200 = GpuFacts(index=0, name="card", total_bytes=80 * 2**30, free_bytes=70 * 2**30, capability=(9, 0))
MACHINE = MachineFacts(num_cores=2, total_bytes=2**34, available_bytes=2**34, gpus=(H200,))
FP8 = ModelOptions(weights="fp8", context_tokens=256)


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES["qwen3"]), tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.language_model.layers.31.mlp.down_proj.weight", True),
        ("blk.7.ffn_gate.weight", True),
        ("blk.7.attn_output.weight", True),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.mlp.experts.3.up_proj.weight", False),
        ("mtp.layers.0.mlp.down_proj.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("blk.7.attn_q.bias", False),
    ],
)
def test_is_rounded_names_the_matrices_of_attention_and_feed_forward_layers(name: str, expected: bool) -> None:
    assert is_rounded(name) == expected


def test_a_model_loads_its_layers_rounded_and_everything_else_as_it_is(path: Path) -> None:
    place = Placement(device=CPU, dtype=torch.float32, context_tokens=CONTEXT, weights="fp8")
    model: Any = recognise(resolve(path)).load(place)
    for block in model.blocks:
        for layer in (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down):
            assert all(isinstance(part, Fp8Tensor) for part in layer.weight.parts)
    assert not isinstance(model.head, RawLinearWeight)
    assert not isinstance(model.embedding, RawLinearWeight)


def test_a_token_meets_rounded_weights_with_the_same_numbers_whatever_is_beside_it() -> None:
    """Both sides are rounded to within a sixteenth; a token's own rounding does not depend on others."""
    raw = RawLinearWeight((random_weight(inputs(), "FP8", (48, 256)),))
    x_TI = inputs(seed=1).normal(5, 256) * torch.tensor([1.0, 1e-4, 30.0, 1.0, 0.0])[:, None]
    y_TO = linear.reference(x_TI, raw)
    exact_TO = x_TI @ raw.parts[0].stored.float().T
    error_T, size_T = (y_TO - exact_TO).pow(2).mean(1).sqrt(), exact_TO.pow(2).mean(1).sqrt()
    alone_TO = linear.reference(x_TI[1:3], raw)
    assert ((alone_TO - y_TO[1:3]).abs() <= 1e-5 * size_T[1:3, None]).all()
    assert (error_T[:4] / size_T[:4] < 0.06).all()
    assert (error_T[:4] > 0).all(), "nothing was rounded"
    assert (y_TO[4] == 0).all()


def test_pack_on_a_cpu_leaves_rounded_weights_to_the_reference() -> None:
    weight = random_weight(inputs(), "FP8", (5, 32))
    assert pack([weight], torch.float32, CPU) == RawLinearWeight((weight,))


def test_plan_counts_a_byte_for_each_number_that_is_rounded(path: Path) -> None:
    artifact = resolve(path)
    plain = plan_model(artifact, replace(FP8, weights=None), EngineOptions(), MACHINE)
    rounded = plan_model(artifact, FP8, EngineOptions(), MACHINE)
    numbers = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    rows = 3 * (64 + 2 * 32 + 64 + 2 * 96 + 64)
    assert plain.plan.weights_bytes - rounded.plan.weights_bytes == numbers - 4 * rows
    assert rounded.plan.weights_bytes == fp8_bytes(artifact, 2)
    assert any("fp8" in decision for decision in rounded.plan.decisions)
    names = [namespace_of(planned, "artifact", ("triton",)) for planned in (plain, rounded)]
    assert names[0] != names[1], "state of one would be taken for the other's"


@pytest.mark.parametrize(("kind", "problem"), [("Q4_K", "its weights are Q4_K already"), ("BF16", None)])
def test_weights_that_are_quantised_already_are_not_rounded(kind: str, problem: str | None) -> None:
    tensor = SimpleNamespace(name="blk.0.attn_q.weight", ggml_type=GgmlType[kind], shape=(64, 256))
    artifact: Any = SimpleNamespace(gguf=SimpleNamespace(tensors={tensor.name: tensor}), safetensors=None)
    assert fp8_refusal(artifact) == problem


def test_plan_refuses_to_round_recurrent_models(tmp_path: Path) -> None:
    artifact = resolve(save(random_model(FAMILIES["qwen3_5"]), tmp_path))
    with pytest.raises(OptionError, match="weights fp8 is not available for models with recurrent layers"):
        plan_model(artifact, FP8, EngineOptions(), MACHINE)
