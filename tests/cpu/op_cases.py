"""What the tests of ops share: providers, the declared tolerances, steps of rows, and paged caches full of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from troth.contracts.names import BLOCK_TOKENS
from troth.ops.attention import LayerKV
from troth.ops.registry import Op
from troth.ops.rows import Rows

CPU = torch.device("cpu")
FLOATS = [pytest.param(torch.float32, id="f32"), pytest.param(torch.bfloat16, id="bf16")]

RowSpec = tuple[int, int, int]
"""(row of the persistent batch, tokens computed before, tokens fed)."""


def providers(op: Op[Any, Any]) -> list[str]:
    """Names of all registered providers."""
    return sorted(op.implementations)


def run(op: Op[Any, Any], provider: str, *args: Any) -> Any:
    """One provider's result, without a fallback; skips where it says that these arguments are not its own."""
    implementation = op.implementations[provider]
    if not implementation.supports(*args):
        pytest.skip(f"{op.name}: {provider} does not take these arguments")
    return implementation.run(*args)


def assert_close(op: Op[Any, Any], got: Tensor, want: Tensor) -> None:
    """Within the op's declared tolerance, and of the same dtype and shape. NaN is close to nothing."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    tolerance = op.tolerances[want.dtype]
    error, size = (got.double() - want.double()).abs(), want.double().abs()
    within = error <= tolerance.absolute + tolerance.relative * size
    assert within.all(), f"{int((~within).sum())} values off, the worst by {error.max()}, of size {size.max()}"


def step(specs: Sequence[RowSpec]) -> Rows:
    """A step's rows; single tokens come first, as in plans."""
    row, starts, num_new = (list(column) for column in zip(*specs, strict=True))
    assert [n == 1 for n in num_new] == sorted((n == 1 for n in num_new), reverse=True), num_new
    return Rows(
        num_new=num_new,
        starts=starts,
        rows=row,
        query_start_R1=torch.tensor([0, *num_new]).cumsum(0).int(),
        context_len_R=torch.tensor(starts).add(torch.tensor(num_new)).int(),
        row_R=torch.tensor(row),
        max_new=max(num_new),
        num_single=num_new.count(1),
        num_exact=sum(1 for start, n in zip(starts, num_new, strict=True) if n == 1 and start),
    )


def paged_kv(
    rows: Rows, num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None = None
) -> tuple[LayerKV, Tensor, Tensor]:
    """A pool whose blocks lie in no order, NaN wherever no token of a row's context is.

    Returns:
        the pool; the block table, int32 [R, B], -1 where nothing is held (before the window, after the end); the
        slots of the new tokens, int64 [T].
    """
    context = rows.context_len_R.tolist()
    width = -(-max(context) // BLOCK_TOKENS)
    num_blocks = rows.num_rows * width + 3
    pool = torch.full((2, num_blocks, num_kv_heads, head_dim * BLOCK_TOKENS), torch.nan, dtype=dtype)
    kv = LayerKV(pool[0].unflatten(2, (head_dim, BLOCK_TOKENS)), pool[1].unflatten(2, (BLOCK_TOKENS, head_dim)))
    free = torch.randperm(num_blocks).tolist()
    table_RB = torch.full((rows.num_rows, width), -1, dtype=torch.int32)
    slots: list[Tensor] = []
    for r, (start, length) in enumerate(zip(rows.starts, context, strict=True)):
        first = 0 if window is None else max(0, start - window + 1) // BLOCK_TOKENS
        for index in range(first, -(-length // BLOCK_TOKENS)):
            table_RB[r, index] = free.pop()
        position = torch.arange(first * BLOCK_TOKENS, length)
        slot = table_RB[r, position // BLOCK_TOKENS].long() * BLOCK_TOKENS + position % BLOCK_TOKENS
        for cache in (kv.k_NKDS.transpose(2, 3), kv.v_NKSD):
            values = torch.randn(len(position), num_kv_heads, head_dim)
            cache[slot // BLOCK_TOKENS, :, slot % BLOCK_TOKENS] = values.to(dtype)
        slots.append(slot[position >= start])
    return kv, table_RB, torch.cat(slots)


def copy_of(kv: LayerKV) -> LayerKV:
    """The same pool in other memory, for an op that writes to it."""
    return LayerKV(kv.k_NKDS.clone(), kv.v_NKSD.clone())
