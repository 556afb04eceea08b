"""Blocks copied within a cache: the reference against what it says, the provider against it (``triton_kernels.py``)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cpu.op_cases import cases, inputs
from troth.ops.codes import as_bytes
from troth.ops.copy_blocks import copy_blocks
from troth.ops.grid import Case

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


def bits(tensor: Tensor) -> Tensor:
    return as_bytes(tensor).clone().view(torch.uint8)


@pytest.mark.parametrize("case", cases(copy_blocks))
def test_copied_blocks_are_the_same_bits_and_no_other_changes(case: Case) -> None:
    source_R, target_R, kv = case.make(inputs(torch.bfloat16))
    before = [bits(tensor) for tensor in kv.tensors().values()]
    copy_blocks.reference(source_R, target_R, kv)
    for tensor, was in zip(kv.tensors().values(), before, strict=True):
        copied = {int(target): int(source) for source, target in zip(source_R, target_R, strict=True) if source >= 0}
        for block in range(len(tensor)):
            assert torch.equal(bits(tensor)[block], was[copied.get(block, block)])
    assert any(source >= 0 for source in source_R)
