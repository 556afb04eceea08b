"""Blocks of a cache copied within it, by a Triton kernel that knows words alone. Legend: R copies, N blocks."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from troth.ops.codes import as_bytes
from troth.ops.copy_blocks import copy_blocks
from troth.ops.impl.triton import takes_cache
from troth.ops.impl.triton_overlap import OVERLAP, await_inputs
from troth.ops.layer_kv import LayerKV

WORDS: Final = 1024
"""Of 4 bytes, to a program: a block of 8 heads of 128 in bfloat16 has 8,192."""


@triton.jit(do_not_specialize_on_alignment=["source", "target"])
def _copy(
    source: tl.tensor,
    target: tl.tensor,
    pool: tl.tensor,
    width: tl.tensor,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_inputs(OVERLAP)
    copy = tl.program_id(0)
    w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    begin = tl.load(source + copy)
    inside = (w < width) & (begin >= 0)
    words = tl.load(pool + begin * width + w, mask=inside, other=0)
    tl.store(pool + tl.load(target + copy) * width + w, words, mask=inside)


def _takes_copy(source_R: Tensor, target_R: Tensor, kv: LayerKV) -> bool:
    return takes_cache(kv)


@copy_blocks.provider("triton", supports=_takes_copy)
def copy_blocks_triton(source_R: Tensor, target_R: Tensor, kv: LayerKV) -> None:
    """As ops.copy_blocks. Ids must be of blocks of the pool: addresses are not checked."""
    for tensor in kv.tensors().values():
        pool_NW = as_bytes(tensor).view(len(tensor), -1).view(torch.int32)
        width = pool_NW.shape[1]
        _copy[(len(source_R), triton.cdiv(width, WORDS))](
            source_R,
            target_R,
            pool_NW,
            width,
            WORDS=WORDS,
            num_warps=4,
            OVERLAP=OVERLAP,
            launch_pdl=OVERLAP,
        )
