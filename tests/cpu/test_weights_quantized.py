"""Quantised matrices against the gguf package, for every tensor type it knows."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
import torch

from troth.artifact.ggml_types import GGML_BLOCKS, GgmlType
from troth.weights import quantized
from troth.weights.quantized import DEQUANTISABLE, QuantTensor


def random_blocks(ggml_type: GgmlType, num_rows: int, num_values: int) -> np.ndarray:
    """Rows of a matrix in the type: quantised from numbers where the package can, else any bytes."""
    generator = np.random.default_rng(int(ggml_type))
    values = generator.standard_normal((num_rows, num_values), dtype=np.float32)
    try:
        blocks = gguf.quantize(values, gguf.GGMLQuantizationType(ggml_type))
    except NotImplementedError:
        return generator.integers(0, 256, (num_rows, ggml_type.row_bytes(num_values)), dtype=np.uint8)
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(num_rows, -1)


def published(ggml_type: GgmlType, blocks: np.ndarray) -> torch.Tensor:
    """The package's own answer for the whole matrix at once."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType(ggml_type)).copy())


def quant_tensor(ggml_type: GgmlType, num_rows: int = 37, num_values: int = 512) -> QuantTensor:
    blocks = random_blocks(ggml_type, num_rows, num_values)
    return QuantTensor(ggml_type, (num_rows, num_values), torch.from_numpy(blocks))


def test_ggml_types_are_those_of_the_gguf_package_with_the_same_block_sizes() -> None:
    theirs = {(kind.name, int(kind)): tuple(sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {(kind.name, int(kind)): sizes for kind, sizes in GGML_BLOCKS.items()} == theirs


@pytest.mark.parametrize("ggml_type", list(GgmlType), ids=lambda kind: kind.name)
def test_dequantisable_names_exactly_the_types_the_gguf_package_can_dequantise(ggml_type: GgmlType) -> None:
    blocks = np.zeros((1, ggml_type.block_bytes), dtype=np.uint8)
    try:
        published(ggml_type, blocks)
    except NotImplementedError:
        assert ggml_type not in DEQUANTISABLE
    else:
        assert ggml_type in DEQUANTISABLE


@pytest.mark.parametrize("ggml_type", sorted(DEQUANTISABLE), ids=lambda kind: kind.name)
def test_dequantize_equals_the_gguf_package_in_any_chunks_for_every_type(
    ggml_type: GgmlType, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = quant_tensor(ggml_type)
    expected = published(ggml_type, weight.raw.numpy())
    torch.testing.assert_close(weight.dequantize(), expected, rtol=0, atol=0, equal_nan=True)
    rounded = weight.dequantize(torch.bfloat16)
    torch.testing.assert_close(rounded, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)
    monkeypatch.setattr(quantized, "_CHUNK_VALUES", 5 * 512)
    torch.testing.assert_close(weight.dequantize(), expected, rtol=0, atol=0, equal_nan=True)


def test_dequantize_of_quantised_numbers_is_close_to_them() -> None:
    """Guards the tests above against comparing one kind of noise with another."""
    values = np.random.default_rng(int(GgmlType.Q8_0)).standard_normal((37, 512), dtype=np.float32)
    assert (quant_tensor(GgmlType.Q8_0).dequantize() - torch.from_numpy(values)).abs().max() < 0.02


@pytest.mark.parametrize("ggml_type", [GgmlType.F16, GgmlType.Q4_1, GgmlType.Q6_K], ids=lambda kind: kind.name)
def test_rows_equal_the_same_rows_of_the_whole_matrix(ggml_type: GgmlType) -> None:
    weight = quant_tensor(ggml_type)
    index = torch.tensor([[36, 0, 5], [5, 5, 17]])
    assert torch.equal(weight.rows(index), weight.dequantize()[index])
    assert torch.equal(weight.rows(index, torch.float16), weight.dequantize(torch.float16)[index])
    assert weight.rows(index[:, :0]).shape == (2, 0, 512)
    with pytest.raises(IndexError):
        weight.rows(torch.tensor([37]))


def test_reordered_puts_the_named_rows_first_and_copies() -> None:
    weight = quant_tensor(GgmlType.Q4_0, num_rows=4)
    index = torch.tensor([3, 1, 0, 2])
    reordered = weight.reordered(index)
    assert torch.equal(reordered.dequantize(), weight.dequantize()[index])
    reordered.raw.zero_()
    assert weight.raw.any()


def test_quant_tensor_counts_the_bytes_of_its_blocks() -> None:
    assert quant_tensor(GgmlType.Q4_1, 3, 64).num_bytes == 3 * 2 * 20


@pytest.mark.parametrize("shape", [(37, 256), (36, 512)])
def test_quant_tensor_refuses_a_shape_its_bytes_do_not_have(shape: tuple[int, int]) -> None:
    raw = quant_tensor(GgmlType.Q8_0).raw
    with pytest.raises(AssertionError):
        QuantTensor(GgmlType.Q8_0, shape, raw)


def test_dequantize_needs_little_memory_beside_its_result() -> None:
    """A matrix of 64 MiB as float32 in one piece would take the numpy reference several times that."""
    weight = quant_tensor(GgmlType.Q8_0, 64, 256)
    large = QuantTensor(GgmlType.Q8_0, (64 * 1024, 256), weight.raw.repeat(1024, 1))
    tracemalloc.start()
    try:
        result = large.dequantize()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.equal(result[:64], weight.dequantize())
    assert peak_bytes < 32 * 2**20
