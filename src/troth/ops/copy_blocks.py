"""Blocks of a cache copied within it. Legend: R copies, N blocks of the pool, K key-value heads, D head size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from troth.ops.attention import paged_kv
from troth.ops.codes import FP8, as_bytes
from troth.ops.grid import Case, Inputs, rows_of, sizes
from troth.ops.layer_kv import LayerKV
from troth.ops.registry import Tolerance, op

_HEADS: Final = ((1, 32), (3, 80))
"""Key-value heads, head size."""
_TIMED_COPIES: Final = (1, 8, 256)


def _grid() -> Iterator[Case]:
    for heads in _HEADS:
        for form, dtype in (("plain", None), ("int8", torch.int8), ("fp8", FP8)):
            for pairs in ([(3, 0)], [(0, 4), (-1, 2), (3, 1)]):
                name = f"{sizes(*heads)}-{form}-{len(pairs)}"
                yield Case(name, partial(_arguments, 5, pairs, heads, dtype))
    for count in _TIMED_COPIES:
        pairs = [(source, 2 * count - 1 - source) for source in range(count)]
        yield Case(f"8x128-{count}", partial(_arguments, 2 * count, pairs, (8, 128), None), timed=True)


@op(
    tolerances={dtype: Tolerance(0.0, 0.0, "a copy") for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    grid=_grid,
)
def copy_blocks(source_R: Tensor, target_R: Tensor, kv: LayerKV) -> None:
    """Have blocks hold what others do, keys, values and their scales.

    Args:
        source_R: int64 [R], blocks that are copied; where one is below 0, nothing is.
        target_R: int64 [R], blocks that are overwritten; none is among those that are copied, and none stands twice
            unless nothing is copied to it.
        kv: read and written in place.
    """
    # A block that is copied onto itself stays as it is; to leave it out would make shapes depend on numbers.
    source_R = torch.where(source_R < 0, target_R, source_R)
    for tensor in map(as_bytes, kv.tensors().values()):
        tensor[target_R] = tensor[source_R]


def _arguments(
    num_blocks: int,
    pairs: list[tuple[int, int]],
    heads: tuple[int, int],
    kv_dtype: torch.dtype | None,
    inputs: Inputs,
) -> tuple[Any, ...]:
    kv, _, _ = paged_kv(inputs, rows_of([(0, 16 * num_blocks, 1)], inputs.device), *heads, dtype=kv_dtype)
    source_R, target_R = torch.tensor(pairs, device=inputs.device).unbind(1)
    return source_R.contiguous(), target_R.contiguous(), kv
