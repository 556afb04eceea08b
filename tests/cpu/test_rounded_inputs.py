"""Quantised matrices that round their inputs: which, under the laws of the engine, and where that is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import laws
from tests.cpu.gguf_models import gguf_name, keys_of, saved_tensors, write
from tests.cpu.test_laws import FAMILIES, engines, requests
from tests.cpu.tiny_models import CONTEXT, CPU, random_model, save
from troth.artifact.ggml_types import GgmlType
from troth.artifact.resolve import resolve
from troth.config.facts import MachineFacts
from troth.config.options import EngineOptions, ModelOptions
from troth.errors import OptionError
from troth.models.family import Model, Placement
from troth.models.registry import recognise
from troth.ops.impl import cpu
from troth.ops.impl.cpu_linear import CpuLinearWeight
from troth.ops.linear import RawLinearWeight, linear
from troth.run.head_decision import HeadDecision
from troth.run.planned import label_of, namespace_of, plan_model
from troth.weights.quantized import QuantTensor
from troth.weights.rounded_inputs import rounded_inputs_refusal
from troth.weights.source import WeightSource

MACHINE = MachineFacts(num_cores=2, total_bytes=2**34, available_bytes=2**34, gpus=())
INT8 = ModelOptions(inputs="int8", context_tokens=256)
needs_kernels = pytest.mark.skipif(cpu.unavailable() is not None, reason="the kernels are not built")


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All matrices in Q4_0 but one."""
    folder = tmp_path_factory.mktemp("qwen3")
    save(random_model(FAMILIES["qwen3"]), folder)
    tensors = {gguf_name(name): tensor for name, tensor in saved_tensors(folder).items()}
    keys = {**keys_of(FAMILIES["qwen3"], 16), "rope.freq_base": 10000.0}
    return write(
        folder / "model.gguf",
        "qwen3",
        keys,
        tensors,
        quantise=lambda name: "norm" not in name and name != "blk.0.attn_k.weight",
        kind="Q4_0",
    )


def load(path: Path) -> Model:
    place = Placement(device=CPU, dtype=torch.float32, context_tokens=CONTEXT, inputs="int8")
    return recognise(resolve(path)).load(place)


def test_source_hands_out_the_layers_matrices_with_their_inputs_rounded_and_the_vocabulary_s_as_it_is(
    path: Path,
) -> None:
    source = WeightSource(resolve(path), inputs="int8")
    rounded = source.linear("model.layers.1.mlp.down_proj.weight")
    assert isinstance(rounded, QuantTensor)
    assert rounded.inputs == torch.int8
    assert isinstance(source.linear("model.layers.0.self_attn.k_proj.weight"), torch.Tensor)
    table = source.linear("model.embed_tokens.weight")
    assert isinstance(table, QuantTensor)
    assert table.inputs is None


def test_reference_of_rounded_inputs_is_off_by_what_eight_bits_are_off(path: Path) -> None:
    raw = WeightSource(resolve(path), inputs="int8").linear("model.layers.1.mlp.up_proj.weight")
    assert isinstance(raw, QuantTensor)
    x_TI = torch.randn(50, raw.shape[1], generator=torch.Generator().manual_seed(1))
    exact = linear.reference(x_TI, RawLinearWeight((replace(raw, inputs=None),)))
    off = (linear.reference(x_TI, RawLinearWeight((raw,))) - exact).norm() / exact.norm()
    assert 0.003 < float(off) < 0.01


@needs_kernels
def test_laws_hold_where_inputs_are_rounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order differ by their last bits, which can make another code of an input: 0.006 was seen."""
    monkeypatch.setattr(laws, "LOGPROB_LIMIT", 0.02)
    model: Any = load(path)
    assert isinstance(model.blocks[0].mlp.gate_up.weight, CpuLinearWeight)
    build = engines(model)
    short = [replace(one, max_tokens=12) for one in requests()[:6]]
    laws.batched_equals_single(build, short)
    laws.chunked_equals_whole(build, short)
    laws.prefix_hit_equals_cold(build, short[:4], laws.Serving())
    growing = [replace(one, prompt_ids=one.prompt_ids[:12], max_tokens=40, eos_ids=frozenset()) for one in requests()]
    laws.preempted_equals_uninterrupted(build, growing[:5], laws.Serving(num_blocks=8))
    stats, _ = laws.speculation_changes_nothing(build, requests()[:6], laws.Serving(), ("external", "ngram"), 4)
    assert stats.num_accepted > 0


@needs_kernels
def test_plan_keeps_cached_state_of_rounded_inputs_apart(path: Path) -> None:
    plain, rounded = (
        plan_model(resolve(path), replace(INT8, inputs=inputs), EngineOptions(), MACHINE) for inputs in (None, "int8")
    )
    names = [namespace_of(planned, "artifact", ("cpu",)) for planned in (plain, rounded)]
    assert names[0] != names[1], "state of one would be taken for the other's"
    assert [label_of(planned).partition(", ")[2] for planned in (plain, rounded)] == ["float16", "float16, inputs int8"]
    assert any("int8" in decision for decision in rounded.plan.decisions)


def test_plan_refuses_rounded_inputs_that_would_change_nothing(tmp_path: Path) -> None:
    artifact = resolve(save(random_model(FAMILIES["qwen3"]), tmp_path))
    with pytest.raises(OptionError, match=r"inputs int8 would change nothing in .*: its matrices are plain numbers"):
        plan_model(artifact, INT8, EngineOptions(), MACHINE)


def test_a_file_of_wide_quants_has_no_inputs_to_round() -> None:
    layer = SimpleNamespace(name="blk.0.attn_q.weight", ggml_type=GgmlType.Q8_0, shape=(64, 64))
    norm = SimpleNamespace(name="blk.0.attn_norm.weight", ggml_type=GgmlType.F32, shape=(64,))
    artifact: Any = SimpleNamespace(gguf=SimpleNamespace(tensors={one.name: one for one in (layer, norm)}))
    refusal = rounded_inputs_refusal(artifact)
    assert refusal is not None
    assert refusal.startswith("its layers are Q8_0, none of Q4_0,")


def test_plan_refuses_rounded_inputs_without_the_kernels_and_beside_a_draft_head(path: Path) -> None:
    artifact = resolve(path)
    with pytest.raises(OptionError, match=r"inputs int8 needs the C\+\+ kernels"):
        plan_model(artifact, INT8, EngineOptions(providers=("torch",)), MACHINE)
    with pytest.raises(OptionError, match="inputs int8 has no certificate for a draft head"):
        plan_model(artifact, INT8, EngineOptions(), MACHINE, HeadDecision(refusal=None))
