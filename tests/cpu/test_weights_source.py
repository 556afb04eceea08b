"""The door to the weights: what it hands out, what it refuses, and that it proves full use."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

from tests.artifact_files import safetensors_bytes, tensor_entry, write_folder
from tests.shared_data import shared
from troth.artifact.ggml_types import GgmlType
from troth.artifact.resolve import resolve
from troth.artifact.safetensors import DTYPE_BITS
from troth.errors import ModelLoadError
from troth.weights import mapped_file
from troth.weights.naming import GGUF_NAMING
from troth.weights.quantized import QuantTensor
from troth.weights.source import WeightSource

Q_NAME = "model.layers.0.self_attn.q_proj.weight"


def folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> WeightSource:
    """A source over a folder with these tensors."""
    root = write_folder(tmp_path / "model", {"config.json": {}})
    safetensors.torch.save_file(tensors, root / "model.safetensors")
    return WeightSource(resolve(root))


def gguf_file(
    tmp_path: Path,
    tensors: dict[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]],
    architecture: str = "llama",
    num_heads: tuple[int, int] = (4, 2),
) -> Path:
    """A GGUF with these tensors, quantised where a type is given, written by the gguf package."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(num_heads[0])
    writer.add_head_count_kv(num_heads[1])
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array if kind is None else gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, dtype=np.float32)


def refusal(call: Any, *arguments: Any, **options: Any) -> ModelLoadError:
    with pytest.raises(ModelLoadError) as caught:
        call(*arguments, **options)
    return caught.value


def test_source_hands_out_every_tensor_of_a_real_model_as_the_reference_reader_does() -> None:
    root = shared("troth-tiny-hybrid")
    source = WeightSource(resolve(root))
    expected = safetensors.torch.load_file(root / "model.safetensors")
    for name, value in expected.items():
        tensor = source.tensor(name, shape=tuple(value.shape))
        assert tensor.dtype == value.dtype
        assert torch.equal(tensor, value)
    source.finish()


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    ],
)
def test_source_keeps_the_dtype_of_safetensors(tmp_path: Path, dtype: str) -> None:
    value = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    tensor = folder(tmp_path, {"a": value, "empty": value[:0]}).tensor("a")
    assert tensor.dtype == value.dtype
    assert tensor.view(torch.uint8).tolist() == value.view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", ["F64", "BOOL", "C64", "F8_E8M0", "F4"])
def test_source_refuses_dtypes_nothing_computes_with_when_they_are_asked_for(tmp_path: Path, dtype: str) -> None:
    num_bytes = DTYPE_BITS[dtype] * 2 // 8
    weights = safetensors_bytes({"a": tensor_entry(dtype, [2], 0, num_bytes)}, bytes(num_bytes))
    source = WeightSource(resolve(write_folder(tmp_path, {"config.json": {}, "model.safetensors": weights})))
    assert source.has("a")
    error = refusal(source.tensor, "a")
    assert error.field == "a"
    assert f"dtype {dtype}" in str(error)


def test_source_copies_a_misaligned_tensor_and_hands_out_an_empty_one(tmp_path: Path) -> None:
    entries = {
        "a": tensor_entry("U8", [1], 0, 1),
        "b": tensor_entry("F32", [2], 1, 9),
        "none": tensor_entry("F32", [0, 3], 9, 9),
    }
    data = b"\1" + np.array([1.5, -2.0], dtype=np.float32).tobytes()
    files = {"config.json": {}, "model.safetensors": safetensors_bytes(entries, data)}
    source = WeightSource(resolve(write_folder(tmp_path, files)))
    tensor = source.tensor("b")
    assert tensor.tolist() == [1.5, -2.0]
    assert tensor.data_ptr() % 4 == 0
    assert source.tensor("none").shape == (0, 3)


def test_source_hands_out_views_that_outlive_it_and_its_file(tmp_path: Path) -> None:
    source = folder(tmp_path, {"a": torch.arange(8.0)})
    first, second = source.tensor("a"), source.tensor("a")
    assert first.data_ptr() == second.data_ptr()
    del source, second
    gc.collect()
    (tmp_path / "model" / "model.safetensors").unlink()
    assert torch.equal(first, torch.arange(8.0))


def test_source_never_lets_a_write_reach_the_file(tmp_path: Path) -> None:
    source = folder(tmp_path, {"a": torch.arange(8.0)})
    path = tmp_path / "model" / "model.safetensors"
    before = path.read_bytes()
    source.tensor("a").fill_(5.0)
    assert path.read_bytes() == before


def test_source_refuses_a_file_that_changed_since_it_was_resolved(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, {"output_norm.weight": numbers(4)})
    artifact = resolve(path)
    os.utime(path, ns=(0, 12345))
    assert "changed since" in str(refusal(WeightSource, artifact))


def test_source_names_a_missing_tensor_and_both_shapes_of_a_wrong_one(tmp_path: Path) -> None:
    source = folder(tmp_path, {"a.weight": torch.zeros(2, 3)})
    for ask in (source.tensor, source.linear, source.norm):
        error = refusal(ask, "b.weight")
        assert error.field == "b.weight"
        assert "not there" in str(error)
        error = refusal(ask, "a.weight", shape=(3, 2))
        assert error.field == "a.weight"
        assert "(2, 3)" in str(error)
        assert "(3, 2)" in str(error)
    assert source.linear("a.weight", shape=(2, 3)).shape == (2, 3)


def test_source_answers_for_optional_tensors(tmp_path: Path) -> None:
    source = folder(tmp_path, {"a": torch.ones(2)})
    assert source.has("a")
    assert not source.has("b")
    assert source.optional_tensor("b") is None
    optional = source.optional_tensor("a", shape=(2,))
    assert optional is not None
    assert optional.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("linear", torch.zeros(4)),
        ("linear", torch.zeros(2, 2, 2)),
        ("linear", torch.zeros(2, 2, dtype=torch.int32)),
        ("norm", torch.zeros(2, 2)),
        ("norm", torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_source_refuses_a_tensor_of_another_kind(tmp_path: Path, method: str, value: torch.Tensor) -> None:
    error = refusal(getattr(folder(tmp_path, {"a": value}), method), "a")
    assert error.field == "a"
    assert "of floats" in str(error)


def test_source_adds_one_to_zero_centred_norms_of_safetensors_in_float32(tmp_path: Path) -> None:
    stored = torch.tensor([0.001, -0.25], dtype=torch.bfloat16)
    source = folder(tmp_path, {"norm": stored})
    assert torch.equal(source.norm("norm"), stored.float())
    assert torch.equal(source.norm("norm", zero_centred=True), stored.float() + 1.0)


def test_source_takes_zero_centred_norms_of_a_gguf_as_they_are(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, {"output_norm.weight": numbers(4)}, "gemma3")
    norm = WeightSource(resolve(path)).norm("model.norm.weight", zero_centred=True, shape=(4,))
    assert torch.equal(norm, torch.from_numpy(numbers(4)))


def test_finish_lists_the_tensors_nobody_took(tmp_path: Path) -> None:
    source = folder(tmp_path, {f"t{i}": torch.zeros(1) for i in range(12)})
    source.tensor("t0")
    message = str(refusal(source.finish))
    assert "11 tensors have no place in this model: t1, t10, t11, t2" in message
    assert message.endswith(", ...")
    for i in range(1, 12):
        source.tensor(f"t{i}")
    source.finish()


def test_finish_ignores_what_matches_a_pattern_and_never_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["model.norm.weight", "mtp.fc.weight", "model.visual.block.0.weight", "Mtp.other"]
    source = folder(tmp_path, {name: torch.zeros(3) for name in names})
    read: list[int] = []
    original = mapped_file.MappedFile.tensor

    def spy(self: Any, offset: int, shape: Any, dtype: Any) -> torch.Tensor:
        read.append(offset)
        return original(self, offset, shape, dtype)

    monkeypatch.setattr(mapped_file.MappedFile, "tensor", spy)
    source.norm("model.norm.weight")
    assert "1 tensors have no place in this model: Mtp.other" in str(
        refusal(source.finish, ["mtp.*", "model.visual.*"])
    )
    source.finish(["mtp.*", "model.visual.*", "Mtp.*"])
    assert len(read) == 1


def test_source_reports_each_tensor_once_and_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    root = write_folder(tmp_path, {"config.json": {}})
    safetensors.torch.save_file(
        {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4)}, root / "model.safetensors"
    )
    source = WeightSource(resolve(root), lambda done, total: seen.append((done, total)))
    assert source.total_bytes == 36
    for name in ("a", "b", "a"):
        source.tensor(name)
    source.finish(["c"])
    assert seen == [(8, 36), (20, 36), (36, 36)]


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama's converter writes them: the halves of each head interleaved."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("part", ["q", "k"])
@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0])
def test_source_puts_the_rows_of_llama_queries_and_keys_back(
    tmp_path: Path, part: str, kind: gguf.GGMLQuantizationType | None
) -> None:
    num_heads = {"q": 4, "k": 2}[part]
    weight, bias = numbers(num_heads * 6, 32), numbers(num_heads * 6)
    kind = kind or gguf.GGMLQuantizationType.F32
    path = gguf_file(
        tmp_path,
        {
            f"blk.0.attn_{part}.weight": (permuted(weight, num_heads), kind),
            f"blk.0.attn_{part}.bias": permuted(bias, num_heads),
            "blk.0.attn_v.weight": (weight, kind),
        },
    )
    source = WeightSource(resolve(path))
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, kind), kind))
    assert not np.array_equal(permuted(weight, num_heads), weight)
    value = source.linear(f"model.layers.0.self_attn.{part}_proj.weight", shape=(num_heads * 6, 32))
    dense = value.dequantize() if isinstance(value, QuantTensor) else value.float()
    assert torch.equal(dense, expected)
    assert torch.equal(source.tensor(f"model.layers.0.self_attn.{part}_proj.bias"), torch.from_numpy(bias))
    assert torch.equal(source.tensor("model.layers.0.self_attn.v_proj.weight").float(), expected)


def test_source_leaves_the_rows_of_other_architectures_alone(tmp_path: Path) -> None:
    weight = numbers(24, 32)
    path = gguf_file(tmp_path, {"blk.0.attn_q.weight": weight}, "qwen2")
    assert torch.equal(WeightSource(resolve(path)).tensor(Q_NAME), torch.from_numpy(weight))


@pytest.mark.parametrize("num_heads", [(5, 2), (0, 2), (24, 24)])
def test_source_refuses_llama_heads_that_do_not_divide_the_rows(tmp_path: Path, num_heads: tuple[int, int]) -> None:
    path = gguf_file(tmp_path, {"blk.0.attn_q.weight": numbers(24, 32)}, "llama", num_heads)
    error = refusal(WeightSource(resolve(path)).linear, Q_NAME)
    assert error.field == "blk.0.attn_q.weight"
    assert "llama.attention.head_count" in str(error)


def test_source_hands_out_quantised_matrices_as_views_and_dense_ones_on_demand(tmp_path: Path) -> None:
    q8 = gguf.GGMLQuantizationType.Q8_0
    weight, experts = numbers(4, 64), numbers(2, 3, 64)
    path = gguf_file(tmp_path, {"token_embd.weight": (weight, q8), "blk.0.ffn_up_exps.weight": (experts, q8)})
    source = WeightSource(resolve(path))
    first = source.linear("model.embed_tokens.weight", shape=(4, 64))
    second = source.linear("model.embed_tokens.weight")
    assert isinstance(first, QuantTensor)
    assert isinstance(second, QuantTensor)
    assert (first.ggml_type, first.shape) == (GgmlType.Q8_0, (4, 64))
    assert first.raw.data_ptr() == second.raw.data_ptr()
    assert torch.equal(source.tensor("model.embed_tokens.weight"), first.dequantize())
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(experts, q8), q8))
    assert torch.equal(source.tensor("blk.0.ffn_up_exps.weight"), expected)


def test_source_gives_unknown_gguf_tensors_their_own_names(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, {"rope_freqs.weight": numbers(4), "blk.0.strange.weight": numbers(2)})
    source = WeightSource(resolve(path))
    factors = source.optional_tensor("rope_freqs.weight", shape=(4,))
    assert factors is not None
    assert torch.equal(factors, torch.from_numpy(numbers(4)))
    assert "blk.0.strange.weight" in str(refusal(source.finish))
    source.finish(["blk.*.strange.*"])


def test_finish_reports_gguf_names_and_ignores_by_either_name(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, {"output_norm.weight": numbers(4)})
    source = WeightSource(resolve(path))
    assert "output_norm.weight" in str(refusal(source.finish))
    source.finish(["model.norm.*"])
    source.finish(["output_norm.*"])


def test_source_refuses_a_gguf_type_nothing_dequantises(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = np.zeros((2, 18), dtype=np.uint8)
    writer.add_tensor("output.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q1_0)
    writer.add_tensor("output_norm.weight", np.zeros(4, dtype=np.float64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = WeightSource(resolve(path))
    for name, stored, kind in (("lm_head", "output", "Q1_0"), ("model.norm", "output_norm", "F64")):
        error = refusal(source.tensor, f"{name}.weight")
        assert error.field == f"{stored}.weight"
        assert f"type {kind}" in str(error)


def test_source_refuses_an_architecture_without_names_and_names_that_collide(tmp_path: Path) -> None:
    error = refusal(WeightSource, resolve(gguf_file(tmp_path, {"a.weight": numbers(2)}, "mamba")))
    assert error.field == "general.architecture"
    assert "'mamba'" in str(error)
    path = gguf_file(tmp_path, {"output_norm.weight": numbers(2), "model.norm.weight": numbers(2)})
    assert "which output_norm.weight means too" in str(refusal(WeightSource, resolve(path)))


@pytest.mark.parametrize("architecture", sorted(GGUF_NAMING))
def test_naming_tables_agree_with_the_converter_of_the_gguf_package(architecture: str) -> None:
    naming = GGUF_NAMING[architecture]
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 12)
    stems = [*naming.outer, *(f"blk.11.{part}" for part in naming.block)]
    for stem in stems:
        name = naming.hugging_face(f"{stem}.weight")
        assert name != f"{stem}.weight"
        assert theirs.get_name(name, (".weight",)) == f"{stem}.weight"
        assert naming.hugging_face(f"{stem}.bias") == name.removesuffix("weight") + "bias"


@pytest.mark.parametrize(
    "name",
    [
        "blk.01.attn_q.weight",
        "blk.-1.attn_q.weight",
        "blk.٣.attn_q.weight",
        "blk." + "9" * 5000 + ".attn_q.weight",
        "blk.0.attn_q.x.weight",
        "attn_q.weight",
        "blk.0.weight",
        "weight",
        "",
    ],
)
def test_naming_leaves_names_that_are_no_blocks_alone(name: str) -> None:
    assert GGUF_NAMING["llama"].hugging_face(name) == name
    assert GGUF_NAMING["llama"].head_count_key(name) is None
