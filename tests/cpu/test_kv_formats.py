"""Formats of the KV cache: what they take in memory, and that whatever belongs to a block travels with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cpu.op_cases import CPU, inputs
from troth.cache.host_copies import HostCopies
from troth.cache.storage import SPARE_BLOCKS, CacheStorage
from troth.config.resolve import ELEMENT_BYTES, SCALE_BYTES
from troth.contracts.cache_spec import AttentionSpec, CacheSpec, RecurrentSpec, StateTensor, with_scales
from troth.contracts.names import BlockId

NUM_BLOCKS = 3


def specs(kv_dtype: str) -> tuple[CacheSpec, ...]:
    plain = AttentionSpec(
        layers=(0, 2), num_kv_heads=2, head_dim=32, value_dim=32, element_bytes=ELEMENT_BYTES[kv_dtype]
    )
    return with_scales((plain,), SCALE_BYTES.get(kv_dtype, 0))


def storage(kv_dtype: str) -> CacheStorage:
    return CacheStorage(specs(kv_dtype), (NUM_BLOCKS,), 1, dtype=getattr(torch, kv_dtype), device=CPU)


@pytest.mark.parametrize("kv_dtype", ELEMENT_BYTES)
def test_storage_takes_the_bytes_that_its_spec_says(kv_dtype: str) -> None:
    (spec,) = specs(kv_dtype)
    assert isinstance(spec, AttentionSpec)
    cache = storage(kv_dtype)
    assert cache.num_bytes == (NUM_BLOCKS + SPARE_BLOCKS) * spec.bytes_per_block
    assert HostCopies(cache).block_bytes(0) == spec.bytes_per_block


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_storage_tells_every_tensor_that_it_holds(kv_dtype: str) -> None:
    """With a draft head's layer, recurrent states and trails beside it."""
    (spec,) = specs(kv_dtype)
    assert isinstance(spec, AttentionSpec)
    state = StateTensor((3, 5), 4)
    every = (replace(spec, frontier_width=24), RecurrentSpec(layers=(1, 3), tensors=(state, state), trail=(state,)))
    cache = CacheStorage(every, (NUM_BLOCKS,), 4, dtype=getattr(torch, kv_dtype), device=CPU)
    held = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in cache.tensors()}
    assert sum(held.values()) == cache.num_bytes


def test_int8_takes_a_byte_per_number_and_a_scale_per_key_and_value() -> None:
    (spec,) = specs("int8")
    assert isinstance(spec, AttentionSpec)
    assert spec.bytes_per_block == 16 * 2 * 2 * (2 * 32 + 2 * 4), "16 tokens, 2 layers, 2 heads"


def test_a_block_that_was_copied_reads_as_the_one_it_was_copied_from() -> None:
    source, target = storage("int8"), storage("int8")
    numbers = inputs().normal(2, 2, 2, 32)
    for layer, kv in source.kv.items():
        kv.write(torch.tensor([16, 31]), numbers[0] * (layer + 1), numbers[1])
    HostCopies(target).write_blocks(0, [BlockId(2)], HostCopies(source).read_blocks(0, [BlockId(1)]))
    for layer in (0, 2):
        read, wrote = source.kv[layer], target.kv[layer]
        assert torch.equal(wrote.keys(torch.tensor(2)), read.keys(torch.tensor(1)))
        assert torch.equal(wrote.values(torch.tensor(2)), read.values(torch.tensor(1)))
        assert wrote.keys(torch.tensor(2)).abs().max() > 1
