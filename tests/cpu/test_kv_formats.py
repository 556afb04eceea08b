"""Formats of the KV cache: what they take in memory, and that whatever belongs to a block travels with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cpu.op_cases import CPU, inputs
from troth.cache.disk_bundle import Bundle, read_bundle, write_bundle
from troth.cache.disk_names import kv_kind
from troth.cache.host_copies import HostCopies
from troth.cache.storage import SPARE_BLOCKS, CacheStorage
from troth.config.resolve import ELEMENT_BYTES, SCALE_BYTES
from troth.contracts.cache_spec import AttentionSpec, CacheSpec, RecurrentSpec, StateTensor, with_scales
from troth.contracts.names import BlockId
from troth.ops.copy_blocks import copy_blocks
from troth.ops.layer_kv import dtype_of

NUM_BLOCKS = 3


def specs(kv_dtype: str) -> tuple[CacheSpec, ...]:
    plain = AttentionSpec(
        layers=(0, 2), num_kv_heads=2, head_dim=32, value_dim=32, element_bytes=ELEMENT_BYTES[kv_dtype]
    )
    return with_scales((plain,), SCALE_BYTES.get(kv_dtype, 0))


def storage(kv_dtype: str) -> CacheStorage:
    return CacheStorage(specs(kv_dtype), (NUM_BLOCKS,), 1, dtype=dtype_of(kv_dtype), device=CPU)


@pytest.mark.parametrize("kv_dtype", ELEMENT_BYTES)
def test_storage_takes_the_bytes_that_its_spec_says(kv_dtype: str) -> None:
    (spec,) = specs(kv_dtype)
    assert isinstance(spec, AttentionSpec)
    cache = storage(kv_dtype)
    assert cache.num_bytes == (NUM_BLOCKS + SPARE_BLOCKS) * spec.bytes_per_block
    assert HostCopies(cache).block_bytes(0) == spec.bytes_per_block


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "fp8"])
def test_storage_tells_every_tensor_that_it_holds(kv_dtype: str) -> None:
    """With a draft head's layer, recurrent states and trails beside it."""
    (spec,) = specs(kv_dtype)
    assert isinstance(spec, AttentionSpec)
    state = StateTensor((3, 5), 4)
    every = (replace(spec, frontier_width=24), RecurrentSpec(layers=(1, 3), tensors=(state, state), trail=(state,)))
    cache = CacheStorage(every, (NUM_BLOCKS,), 4, dtype=dtype_of(kv_dtype), device=CPU)
    held = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in cache.tensors()}
    assert sum(held.values()) == cache.num_bytes


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "fp8"])
def test_copied_blocks_mean_what_those_they_were_copied_from_do(kv_dtype: str) -> None:
    """As a draft head's first blocks; others stay as they are."""
    kv = storage(kv_dtype).kv[2]
    k_TKD, v_TKD = (inputs(seed=seed).normal(48, 2, 32) for seed in range(2))
    kv.write(torch.arange(48), k_TKD, v_TKD)
    every = torch.arange(3)
    before = kv.keys(every), kv.values(every)
    copy_blocks(torch.tensor([2, -1]), torch.tensor([0, 1]), kv)
    for now, was in zip((kv.keys(every), kv.values(every)), before, strict=True):
        assert torch.equal(now, was[[2, 1, 2]])
        assert not torch.equal(was[0], was[2])


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_codes_take_a_byte_per_number_and_a_scale_per_key_and_value(kv_dtype: str) -> None:
    (spec,) = specs(kv_dtype)
    assert isinstance(spec, AttentionSpec)
    assert spec.bytes_per_block == 16 * 2 * 2 * (2 * 32 + 2 * 4), "16 tokens, 2 layers, 2 heads"


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_block_that_was_copied_reads_as_the_one_it_was_copied_from(kv_dtype: str, tmp_path: Path) -> None:
    """By way of a file, as the disk cache takes it."""
    source, target = storage(kv_dtype), storage(kv_dtype)
    numbers = inputs().normal(2, 2, 2, 32)
    for layer, kv in source.kv.items():
        kv.write(torch.tensor([16, 31]), numbers[0] * (layer + 1), numbers[1])
    tensors = HostCopies(source).read_blocks(0, [BlockId(1)])
    bundle = Bundle(kind=kv_kind(0), namespace="n", names=(bytes(32),), tensors=tensors)
    file, _ = write_bundle(bundle, tmp_path, tmp_path)
    read = read_bundle(tmp_path, file).tensors
    assert HostCopies(target).takes_blocks(0, read)
    HostCopies(target).write_blocks(0, [BlockId(2)], read)
    for layer in (0, 2):
        ours, wrote = source.kv[layer], target.kv[layer]
        assert torch.equal(wrote.keys(torch.tensor(2)), ours.keys(torch.tensor(1)))
        assert torch.equal(wrote.values(torch.tensor(2)), ours.values(torch.tensor(1)))
        assert wrote.keys(torch.tensor(2)).abs().max() > 1
