"""docs/models.md says which weights compute, which rotations are known, and what is refused in which words."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.artifact_files import (
    SMALL_KEYS,
    U16,
    gguf_bytes,
    safetensors_bytes,
    small_model_files,
    tensor_entry,
    write_folder,
)
from tests.markdown import Document, code, codes
from tests.portable.vocabularies import byte_level_metadata
from troth import compose
from troth.artifact.ggml_types import GgmlType
from troth.artifact.resolve import resolve
from troth.artifact.safetensors import DTYPE_BITS, SINGLE_NAME
from troth.config.facts import MachineFacts
from troth.config.options import EngineOptions, ModelOptions
from troth.config.resolve import CPU_RESERVE_BYTES
from troth.errors import ModelLoadError
from troth.models import gemma3, llama
from troth.models.registry import recognise
from troth.nn.rope import SCALINGS, rope_config
from troth.ops.linear import dense
from troth.run.planned import require_fit
from troth.text.gguf_tokenizer import tokenizer_from_gguf
from troth.text.tokenizer_json import load_tokenizer
from troth.weights.source import WeightSource

DOCUMENT = Document.read("docs/models.md")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA_KEYS: dict[str, Any] = {
    "vocab_size": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "block_count": 1,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 4096,
}


def safetensors_source(root: Path, dtype: str = "F32", shape: tuple[int, ...] = (4, 8)) -> WeightSource:
    """A source with one tensor ``w`` of zeros."""
    num_bytes = torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8
    header = {"w": tensor_entry(dtype, list(shape), 0, num_bytes)}
    files = {"config.json": {}, SINGLE_NAME: safetensors_bytes(header, bytes(num_bytes))}
    return WeightSource(resolve(write_folder(root, files)))


def gguf_source(root: Path, kind: GgmlType) -> WeightSource:
    """A source with one matrix ``w`` of zeros of this type."""
    data = bytes(2 * kind.block_bytes)
    tensor = ("w", (2, kind.block_size), int(kind), 0)
    write_folder(root, {"model.gguf": gguf_bytes(SMALL_KEYS, [tensor], data + bytes(-len(data) % 32))})
    return WeightSource(resolve(root / "model.gguf"))


def is_computed_with(source: WeightSource) -> bool:
    """Whether ``w`` becomes a matrix of numbers."""
    try:
        weight = source.linear("w")
    except ModelLoadError:
        return False
    return dense(weight, torch.float32, torch.device("cpu")).dtype == torch.float32


@pytest.mark.parametrize("kind", list(GgmlType), ids=lambda kind: kind.name)
def test_models_document_says_which_gguf_types_are_weights(tmp_path: Path, kind: GgmlType) -> None:
    rows = DOCUMENT.table("type", "values per block", "bytes per block", "bits per value", "as a weight")
    said = {code(row["type"]): row["as a weight"] for row in rows}[kind.name]
    assert said == ("yes" if is_computed_with(gguf_source(tmp_path, kind)) else "no")


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_models_document_says_which_safetensors_dtypes_are_weights(tmp_path: Path, dtype: str) -> None:
    said = {code(row["dtype"]): row["as a weight"] for row in DOCUMENT.table("dtype", "as a weight")}[dtype]
    assert (said != "no") == is_computed_with(safetensors_source(tmp_path, dtype))


def test_models_document_lists_every_rotary_scaling_with_its_keys() -> None:
    rows = DOCUMENT.table("`rope_type`", "needs", "may have")
    listed = {code(row["`rope_type`"]): (tuple(codes(row["needs"])), tuple(codes(row["may have"]))) for row in rows}
    assert listed == SCALINGS


def test_models_document_says_what_stands_for_the_original_context() -> None:
    assert "A missing `original_max_position_embeddings` is the model's own" in DOCUMENT.flat
    config = rope_config({"rope_type": "yarn", "factor": 2.0}, rotary_dim=8, default_theta=1e4, context_tokens=4096)
    assert config.values["original_max_position_embeddings"] == 4096


def refused_architecture(root: Path) -> None:
    recognise(resolve(write_folder(root, small_model_files())))


def refused_key(root: Path) -> None:
    llama.Config.from_hf({**LLAMA, "attention_sinks": 4}, "config.json")


def refused_quantisation(root: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"could change its results: quantization$"):
        llama.Config.from_hf({**LLAMA, "quantization": {"bits": 4}}, "config.json")
    llama.Config.from_hf({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "config.json")


def refused_activation(root: Path) -> None:
    llama.Config.from_hf({**LLAMA, "hidden_act": "gelu"}, "config.json")


def refused_scaling(root: Path) -> None:
    llama.Config.from_hf({**LLAMA, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "config.json")


def refused_experts(root: Path) -> None:
    llama.Config.from_gguf({**LLAMA_KEYS, "expert_count": 8}, "model.gguf")


def refused_bidirectional(root: Path) -> None:
    gemma3.Config.from_hf({**LLAMA, "use_bidirectional_attention": True}, "config.json")


def refused_score_cap(root: Path) -> None:
    gemma3.Config.from_hf({**LLAMA, "attn_logit_softcapping": 50.0}, "config.json")


def refused_leftover(root: Path) -> None:
    safetensors_source(root).finish()


def refused_missing(root: Path) -> None:
    safetensors_source(root).linear("v")


def refused_shape(root: Path) -> None:
    safetensors_source(root).linear("w", shape=(8, 4))


def refused_type(root: Path) -> None:
    with pytest.raises(ModelLoadError, match="which nothing here computes with"):
        safetensors_source(root / "folder", "F64").linear("w")
    gguf_source(root, GgmlType.Q8_K).linear("w")


def refused_integers(root: Path) -> None:
    safetensors_source(root, "I8").linear("w")


def refused_pickle(root: Path) -> None:
    for name in ("w.bin", "w.pt", "w.pth"):
        with pytest.raises(ModelLoadError, match="pickled weights are never loaded"):
            resolve(write_folder(root / name, {name: b""}))
    resolve(write_folder(root, {"w.ckpt": b""}))


def refused_part(root: Path) -> None:
    resolve_bytes(root, gguf_bytes([*SMALL_KEYS, ("split.count", U16, 3)]))


def refused_version(root: Path) -> None:
    resolve_bytes(root, gguf_bytes(version=1))


def refused_byte_order(root: Path) -> None:
    (version,) = struct.unpack(">I", struct.pack("<I", 3))
    resolve_bytes(root, gguf_bytes(version=version))


def refused_cut(root: Path) -> None:
    with pytest.raises(ModelLoadError, match="but the file ends at"):
        resolve_bytes(root, gguf_bytes()[:-1])
    files = small_model_files()
    resolve(write_folder(root / "folder", {**files, SINGLE_NAME: files[SINGLE_NAME][:-1]}))


def refused_link(root: Path) -> None:
    write_folder(root / "elsewhere", {"config.json": {}})
    files = small_model_files()
    del files["config.json"]
    folder = write_folder(root / "model", files)
    (folder / "config.json").symlink_to(root / "elsewhere" / "config.json")
    resolve(folder)


def refused_tokenizer_files(root: Path) -> None:
    load_tokenizer(write_folder(root, {"tokenizer.model": b"", "vocab.json": {}, "merges.txt": ""}))


def refused_tokenizer(root: Path) -> None:
    tokenizer_from_gguf(byte_level_metadata(model="rwkv"))


def refused_cutting(root: Path) -> None:
    tokenizer_from_gguf(byte_level_metadata(pre="unheard-of"))


def refused_size(root: Path) -> None:
    """Weights of 64 MiB where 48 are left beside what every plan needs; half as many bytes fit."""
    num_values = 2**24
    header = {"w": tensor_entry("BF16", [num_values], 0, 2 * num_values)}
    folder = write_folder(root, {"config.json": LLAMA, SINGLE_NAME: safetensors_bytes(header)})
    with (folder / SINGLE_NAME).open("r+b") as file:
        file.truncate((folder / SINGLE_NAME).stat().st_size + 2 * num_values)
    model = ModelOptions(device="cpu")
    # Without the kernels that compute on weights as they are stored.
    planned = compose.plan(resolve(folder), model, EngineOptions(providers=("torch",)))
    require_fit(planned)


REFUSALS: Mapping[str, Callable[[Path], None]] = {
    "another architecture": refused_architecture,
    "a config key that no family knows": refused_key,
    "quantised safetensors (`quantization_config`, `quantization`)": refused_quantisation,
    "another activation": refused_activation,
    "another rotary scaling": refused_scaling,
    "mixture of experts in a GGUF of architecture `llama`": refused_experts,
    "Gemma with bidirectional attention": refused_bidirectional,
    "Gemma 2's capped attention scores": refused_score_cap,
    "a tensor that is left over": refused_leftover,
    "a tensor that is missing": refused_missing,
    "a tensor of another shape": refused_shape,
    "a tensor type that is not in the tables": refused_type,
    "integer weights": refused_integers,
    "pickled weights (`.bin`, `.pt`, `.pth`, `.ckpt`)": refused_pickle,
    "a GGUF in several parts": refused_part,
    "a GGUF of version 1": refused_version,
    "a big-endian GGUF": refused_byte_order,
    "a file cut short": refused_cut,
    "a link that leads out of the model's folder": refused_link,
    "a folder without `tokenizer.json`": refused_tokenizer_files,
    "another GGUF tokenizer": refused_tokenizer,
    "another way of cutting words": refused_cutting,
    "a model larger than the memory that is free": refused_size,
}


def resolve_bytes(root: Path, content: bytes) -> None:
    resolve(write_folder(root, {"model.gguf": content}) / "model.gguf")


def small_machine() -> MachineFacts:
    """Room for what every plan needs and 48 MiB more."""
    usable = CPU_RESERVE_BYTES + 48 * 2**20
    available = int(usable / 0.9) + 1
    return MachineFacts(num_cores=1, total_bytes=available, available_bytes=available)


def test_models_document_lists_the_refusals_that_are_tried_here() -> None:
    assert [row["what"] for row in DOCUMENT.table("what", "words of the error")] == list(REFUSALS)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row["what"]) for row in DOCUMENT.table("what", "words of the error")]
)
def test_models_document_gives_the_words_of_a_refusal(
    row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "machine_facts", small_machine)
    with pytest.raises(ModelLoadError) as caught:
        REFUSALS[row["what"]](tmp_path)
    assert row["words of the error"] in str(caught.value)
