"""Where blocks lie in main memory: all layers of one together, and kernels that find them there, bit for bit."""

from __future__ import annotations

import mmap
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.cpu.op_cases import CPU, inputs, providers, run, tensors
from troth.cache.storage import SPARE_BLOCKS, CacheStorage
from troth.contracts.cache_spec import AttentionSpec
from troth.ops.attention import attention
from troth.ops.codes import as_bytes
from troth.ops.grid import Case
from troth.ops.layer_kv import LayerKV, dtype_of
from troth.ops.registry import Op
from troth.ops.rotary_kv_write import rotary_kv_write

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


OTHERS = 255
"""What lies between blocks, as bytes."""


def between_others(kv: LayerKV) -> tuple[LayerKV, Tensor]:
    """The same blocks, 64 bytes of others before and behind each; and all of that, uint8 [N, bytes]."""
    held = kv.tensors()
    sizes = [tensor[0].numel() * tensor.element_size() for tensor in held.values()]
    pool_NB = torch.full((len(kv.k_NKDS), sum(sizes) + 128), OTHERS, dtype=torch.uint8)
    moved, first = list[Tensor](), 64
    for tensor, size in zip(held.values(), sizes, strict=True):
        place = pool_NB[:, first : first + size].view(tensor.dtype).view(tensor.shape)
        as_bytes(place).copy_(as_bytes(tensor))
        moved.append(place)
        first += size
    assert not moved[0].is_contiguous()
    return LayerKV(*moved), pool_NB


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


@pytest.mark.parametrize(
    ("op", "provider", "case"),
    [
        pytest.param(op, provider, case, id=f"{op.name}-{provider}-{case.name}")
        for op in (attention, rotary_kv_write)
        for provider in providers(op)
        for case in op.grid()
        if not case.timed
    ],
)
def test_an_op_finds_blocks_between_those_of_other_layers(op: Op[..., Tensor], provider: str, case: Case) -> None:
    together, apart = case.make(inputs()), list(case.make(inputs()))
    (place,) = (i for i, argument in enumerate(apart) if isinstance(argument, LayerKV))
    apart[place], pool_NB = between_others(apart[place])
    want, got = run(op, provider, *together), run(op, provider, *apart)
    assert torch.equal(bits(got), bits(want))
    for ours, theirs in zip(tensors(tuple(apart)), tensors(together), strict=True):
        assert torch.equal(bits(ours), bits(theirs)), "what the op wrote"
    first, held = 64, apart[place].tensors().values()
    end = first + sum(tensor[0].numel() * tensor.element_size() for tensor in held)
    assert bool((pool_NB[:, :first] == OTHERS).all())
    assert bool((pool_NB[:, end:] == OTHERS).all()), "the op wrote beside its blocks"


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_a_block_of_all_layers_is_one_stretch_of_memory(kv_dtype: str) -> None:
    """Or the first prompts of a model of 30 layers clear 60 huge pages, for each tensor another (docs/adr/0020)."""
    spec = AttentionSpec(layers=(0, 2, 5), num_kv_heads=3, head_dim=64, value_dim=64, element_bytes=2)
    cache = CacheStorage((spec,), (7,), 1, dtype=dtype_of(kv_dtype), device=CPU)
    ((pool_NB,),) = cache.pools
    assert len(pool_NB) == 7 + SPARE_BLOCKS
    begin, stride = pool_NB.data_ptr(), pool_NB.stride(0)
    assert begin % mmap.PAGESIZE == 0, "or each line of keys would be two"
    places = list[tuple[int, int]]()
    for kv in cache.kv.values():
        for tensor in kv.tensors().values():
            assert tensor.stride(0) * tensor.element_size() == stride
            first = tensor.data_ptr() - begin
            places.append((first, first + tensor[0].numel() * tensor.element_size()))
    places.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(places)), "none overlap"
    assert places[0][0] == 0
    assert places[-1][1] <= stride
    assert stride == sum(last - first for first, last in places), "nor is there a gap, where all are whole lines"
