"""The short convolution: providers against the reference, the reference against a sum, and its per-row state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.op_cases import FLOATS, RowSpec, assert_close, providers, run, step
from troth.ops.short_conv import short_conv

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

MAX_ROWS = 5
STEPS: dict[str, list[RowSpec]] = {
    "one-single": [(3, 9, 1)],
    "first-token": [(2, 0, 1)],
    "neighbours": [(1, 4, 1), (2, 0, 1), (3, 7, 1)],
    "scattered-singles": [(4, 3, 1), (0, 0, 1), (2, 1, 1)],
    "prompt": [(1, 0, 9)],
    "shorter-than-the-taps": [(1, 0, 2), (0, 5, 2)],
    "mixed": [(4, 2, 1), (1, 0, 1), (0, 0, 17), (3, 1, 5)],
}


def state(rows: list[RowSpec], taps: int, channels: int) -> torch.Tensor:
    """What each row remembers; NaN in rows that start at 0 and in those that take no part."""
    memory = torch.full((MAX_ROWS, taps - 1, channels), torch.nan)
    for row, start, _ in rows:
        if start > 0:
            memory[row] = torch.randn(taps - 1, channels)
    return memory


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("channels", [1, 33, 128])
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("specs", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("provider", providers(short_conv))
def test_short_conv_equals_the_reference(
    provider: str, specs: list[RowSpec], taps: int, channels: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = step(specs)
    # The input arrives as a slice of a wider product.
    x_TC = torch.randn(sum(rows.num_new), channels + 3).to(dtype)[:, :channels]
    weight_KC, before = torch.randn(taps, channels), state(specs, taps, channels)
    state_got, state_want = before.clone(), before.clone()
    got = run(short_conv, provider, x_TC, weight_KC, state_got, rows)
    assert_close(short_conv, got, short_conv.reference(x_TC, weight_KC, state_want, rows))
    assert torch.equal(state_got.nan_to_num(77), state_want.nan_to_num(77)), "inputs are remembered exactly"


def test_short_conv_sums_the_last_inputs_of_each_channel() -> None:
    x_TC, weight_KC = torch.randn(6, 2), torch.randn(3, 2)
    memory = torch.full((1, 2, 2), torch.nan)
    got = short_conv.reference(x_TC, weight_KC, memory, step([(0, 0, 6)]))
    padded = torch.cat((torch.zeros(2, 2), x_TC))
    for t in range(6):
        want = sum(padded[t + k] * weight_KC[k] for k in range(3))
        torch.testing.assert_close(got[t], F.silu(torch.as_tensor(want)))
    assert torch.equal(memory[0], x_TC[-2:])


@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (5, 6), (10, 1), (2, 9)])
def test_short_conv_in_chunks_equals_the_whole(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x_TC, weight_KC = torch.randn(11, 16), torch.randn(4, 16)
    memory = torch.full((2, 3, 16), torch.nan)
    whole = short_conv(x_TC, weight_KC, memory, step([(0, 0, 11)]))
    parts, begin = [], 0
    for size in sizes:
        parts.append(short_conv(x_TC[begin : begin + size], weight_KC, memory, step([(1, begin, size)])))
        begin += size
    assert_close(short_conv, torch.cat(parts), whole)
    assert torch.equal(memory[0], memory[1])
