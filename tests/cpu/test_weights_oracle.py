"""Our readers against the gguf package's, on real files: every key, every tensor, every value."""

from __future__ import annotations

import gzip
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.model_files import gemma3_270m, smollm2
from tests.shared_data import shared
from troth.artifact.gguf import read_gguf
from troth.artifact.resolve import resolve
from troth.weights.naming import GGUF_NAMING
from troth.weights.quantized import QuantTensor
from troth.weights.source import WeightSource


@pytest.fixture(scope="module", params=[smollm2, gemma3_270m], ids=["smollm2", "gemma3"])
def reference(request: pytest.FixtureRequest) -> tuple[Path, gguf.GGUFReader]:
    """A real file, and the gguf package's reading of it (seconds: once per file)."""
    path = request.param()
    return path, gguf.GGUFReader(path)


def compare_headers(path: Path, reader: gguf.GGUFReader) -> None:
    header = read_gguf(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for name, field in fields.items():
        assert header.metadata[name] == field.contents(), name
    assert header.data_offset == reader.data_offset
    assert [(t.name, t.shape, int(t.ggml_type), t.offset, t.num_bytes) for t in header.tensors.values()] == [
        (t.name, tuple(t.shape.tolist()[::-1]), int(t.tensor_type), t.data_offset, t.n_bytes) for t in reader.tensors
    ]


def test_read_gguf_agrees_with_the_gguf_package_on_a_real_model(
    reference: tuple[Path, gguf.GGUFReader],
) -> None:
    compare_headers(*reference)


@pytest.mark.parametrize("name", ["bert-bge"])
def test_read_gguf_agrees_with_the_gguf_package_on_a_vocabulary(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(gzip.decompress(shared(f"gguf_vocab/ggml-vocab-{name}.gguf.gz").read_bytes()))
    compare_headers(path, gguf.GGUFReader(path))


def test_source_values_agree_with_the_gguf_package_on_a_real_model(
    reference: tuple[Path, gguf.GGUFReader],
) -> None:
    path, reader = reference
    artifact = resolve(path)
    assert artifact.gguf is not None
    architecture = str(artifact.gguf.metadata["general.architecture"])
    source = WeightSource(artifact)
    naming = GGUF_NAMING[architecture]
    num_heads = {
        "attn_q": artifact.gguf.metadata[f"{architecture}.attention.head_count"],
        "attn_k": artifact.gguf.metadata[f"{architecture}.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        expected = gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        heads = num_heads.get(tensor.name.split(".")[-2])
        if architecture == "llama" and isinstance(heads, int):
            pairs = expected.reshape(heads, -1, 2, expected.shape[-1])
            expected = pairs.swapaxes(1, 2).reshape(expected.shape)
        name = naming.hugging_face(tensor.name)
        taken = source.linear(name) if expected.ndim == 2 else source.norm(name)
        dense = taken.dequantize() if isinstance(taken, QuantTensor) else taken
        assert torch.equal(dense.float(), torch.from_numpy(expected.copy())), tensor.name
    source.finish()
