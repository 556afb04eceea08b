"""The short convolution: providers against the reference, the reference against a sum, and its per-row state."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.op_cases import CPU, FLOATS, assert_close, cases, inputs, providers, run, step
from troth.contracts.cache_spec import TRAIL_TOKENS
from troth.ops.grid import Case, rows_of
from troth.ops.short_conv import short_conv

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(short_conv))
@pytest.mark.parametrize("provider", providers(short_conv))
def test_short_conv_equals_the_reference(provider: str, case: Case, dtype: torch.dtype) -> None:
    args, args_want = case.make(inputs(dtype)), case.make(inputs(dtype))
    assert_close(short_conv, run(short_conv, provider, *args), short_conv.reference(*args_want))
    for got, want in zip(args[2:4], args_want[2:4], strict=True):
        assert torch.equal(got.nan_to_num(77), want.nan_to_num(77)), "inputs are remembered exactly"


def test_short_conv_sums_the_last_inputs_of_each_channel() -> None:
    x_TC, weight_KC = torch.randn(6, 2), torch.randn(3, 2)
    memory = torch.full((1, 2, 2), torch.nan)
    rest = (torch.empty(1, TRAIL_TOKENS, 2), step([(0, 0, 6)]))
    got = short_conv.reference(x_TC, weight_KC, memory, *rest)
    plain = short_conv.reference(x_TC, weight_KC, memory, *rest, silu=False)
    padded = torch.cat((torch.zeros(2, 2), x_TC))
    for t in range(6):
        want = sum(padded[t + k] * weight_KC[k] for k in range(3))
        torch.testing.assert_close(got[t], F.silu(torch.as_tensor(want)))
        torch.testing.assert_close(plain[t], torch.as_tensor(want))
    assert torch.equal(memory[0], x_TC[-2:])


@pytest.mark.parametrize("sizes", [(1, 1, 1, 8), (5, 6), (10, 1), (2, 9)])
def test_short_conv_in_chunks_equals_the_whole(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x_TC, weight_KC = torch.randn(11, 16), torch.randn(4, 16)
    memory, trail = torch.full((2, 3, 16), torch.nan), torch.full((2, TRAIL_TOKENS, 16), torch.nan)
    whole = short_conv(x_TC, weight_KC, memory, trail, step([(0, 0, 11)]))
    parts, begin = [], 0
    for size in sizes:
        parts.append(short_conv(x_TC[begin : begin + size], weight_KC, memory, trail, step([(1, begin, size)])))
        begin += size
    assert_close(short_conv, torch.cat(parts), whole)
    assert torch.equal(memory[0], memory[1])


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("provider", ["reference", *providers(short_conv)])
@pytest.mark.parametrize("num_right", range(4))
def test_short_conv_with_drafts_equals_single_tokens_bit_by_bit(provider: str, num_right: int, silu: bool) -> None:
    if provider == "cpu" and not silu:
        pytest.skip("short_conv: cpu does not take these arguments")
    check_drafts(provider, num_right, silu)


def check_drafts(provider: str, num_right: int, silu: bool = True) -> None:
    """Drafts are computed as the tokens they stand for; whichever prefix was right, the next step finds its state."""
    torch.manual_seed(0)
    call = partial(
        short_conv.reference if provider == "reference" else short_conv.implementations[provider].run, silu=silu
    )
    # Whole vectors, as models have: PyTorch computes what is left over by another exponential.
    x_TC, weight_KC = torch.randn(9, 64), torch.randn(4, 64)
    memory, trail = torch.randn(2, 3, 64), torch.full((2, TRAIL_TOKENS, 64), torch.nan)
    memory[1] = memory[0]
    single = [call(x_TC[t : t + 1], weight_KC, memory, trail, step([(1, 5 + t, 1)])) for t in range(1 + num_right)]
    verified = call(x_TC[:4], weight_KC, memory, trail, rows_of([(0, 5, 4)], CPU, num_verifies=1))
    assert torch.equal(verified[: 1 + num_right], torch.cat(single))
    at = 1 + num_right
    again = rows_of([(0, 5 + at, 1)], CPU, recalls={0: num_right} if num_right else {})
    next_token = call(x_TC[8:], weight_KC, memory, trail, again)
    assert torch.equal(next_token, call(x_TC[8:], weight_KC, memory, trail, step([(1, 5 + at, 1)])))
    assert torch.equal(memory[0], memory[1])
