"""The gated delta rule: providers against the token by token reference, and what the rule promises."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.op_cases import CPU, FLOATS, assert_close, cases, inputs, providers, run, step
from troth.contracts.cache_spec import TRAIL_TOKENS
from troth.ops.gated_delta import Decay, arguments, gated_delta, trail_size
from troth.ops.grid import Case, rows_of
from troth.ops.rows import Rows

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(gated_delta))
@pytest.mark.parametrize("provider", providers(gated_delta))
def test_gated_delta_equals_the_reference_and_touches_its_rows_only(
    provider: str, case: Case, dtype: torch.dtype
) -> None:
    args, args_want = case.make(inputs(dtype)), case.make(inputs(dtype))
    got, want = run(gated_delta, provider, *args), gated_delta.reference(*args_want)
    assert_close(gated_delta, got, want)
    for state_got, state_want in zip(args[5:7], args_want[5:7], strict=True):
        assert torch.equal(state_got.isnan(), state_want.isnan()), "states or trails of other rows were touched"
        assert_close(gated_delta, state_got.nan_to_num(), state_want.nan_to_num())


def test_gated_delta_reference_follows_the_recurrence() -> None:
    """Token by token in float64, from the rule as it is written down."""
    args = arguments([(2, 5, 20)], (2, 4, 8, 6), inputs())
    qkv, _, beta, raw_decay, decay, memory, _, _ = args
    beta, log_decay = beta.double().sigmoid(), -decay.rate_H.double() * F.softplus(raw_decay.double() + decay.bias_H)
    s = memory[2].double()
    got = gated_delta.reference(*args)
    q, k = (qkv[:, i * 16 : (i + 1) * 16].double().view(20, 2, 8) for i in range(2))
    v = qkv[:, 32:].double().view(20, 4, 6)
    for t in range(20):
        for h in range(4):
            unit_q, unit_k = (x[t, h // 2] / (x[t, h // 2].square().sum() + 1e-6).sqrt() for x in (q, k))
            s[h] *= log_decay[t, h].exp()
            s[h] += torch.outer(unit_k, beta[t, h] * (v[t, h] - s[h].T @ unit_k))
            assert_close(gated_delta, got[t, h], (s[h].T @ unit_q / 8**0.5).float())
    assert_close(gated_delta, memory[2], s.float())


@pytest.mark.parametrize("provider", ["reference", *providers(gated_delta)])
def test_gated_delta_recalls_the_last_value_of_a_key(provider: str) -> None:
    """Without decay and at full learning rate, a key written twice answers with what was written last."""
    torch.manual_seed(0)
    key, other = torch.eye(16)[3], torch.eye(16)[7]
    first, second, between = torch.randn(3, 16)
    tokens = [(other, key, first), (key, other, between), (key, key, second), (other, other, between)]
    qkv = torch.stack([torch.cat(token) for token in tokens])
    call = gated_delta.reference if provider == "reference" else gated_delta.implementations[provider].run
    memory = torch.full((1, 1, 16, 16), torch.nan)
    trail = torch.full((1, TRAIL_TOKENS, trail_size(1, 1, 16, 16)), torch.nan)
    fully, never = torch.full((4, 1), torch.inf), torch.full((4, 1), -torch.inf)
    decay = Decay(torch.ones(1), torch.zeros(1))
    out = call(qkv, 1, fully, never, decay, memory, trail, step([(0, 0, 4)]))[:, 0] * 4
    nothing = torch.zeros(16)
    torch.testing.assert_close(out, torch.stack((nothing, first, second, between)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 98), (64, 36), (37, 63), (99, 1)])
def test_gated_delta_in_chunks_equals_the_whole(sizes: tuple[int, ...]) -> None:
    args = arguments([(0, 0, 100)], (2, 4, 32, 16), inputs())
    qkv, _, beta, raw_decay, decay, memory, trail, _ = args
    whole = gated_delta(*args)
    parts, begin = [], 0
    for size in sizes:
        at = slice(begin, begin + size)
        chunk = step([(1, begin, size)])
        parts.append(gated_delta(qkv[at], 2, beta[at], raw_decay[at], decay, memory, trail, chunk))
        begin += size
    assert_close(gated_delta, torch.cat(parts), whole)
    assert_close(gated_delta, memory[1], memory[0])


@pytest.mark.parametrize("provider", ["reference", *providers(gated_delta)])
@pytest.mark.parametrize("num_right", range(4))
def test_gated_delta_with_drafts_equals_single_tokens_bit_by_bit(provider: str, num_right: int) -> None:
    check_drafts(provider, num_right)


def check_drafts(provider: str, num_right: int) -> None:
    """Drafts are computed as the tokens they stand for; whichever prefix was right, the next step finds its state."""
    call = gated_delta.reference if provider == "reference" else gated_delta.implementations[provider].run
    qkv, _, beta, raw_decay, decay, memory, trail, _ = arguments([(1, 5, 9)], (2, 4, 32, 16), inputs())
    memory[0] = memory[1]

    def tokens(begin: int, end: int, rows: Rows) -> Tensor:
        return call(qkv[begin:end], 2, beta[begin:end], raw_decay[begin:end], decay, memory, trail, rows)

    single = [tokens(t, t + 1, step([(1, 5 + t, 1)])) for t in range(1 + num_right)]
    verified = tokens(0, 4, rows_of([(0, 5, 4)], CPU, num_verifies=1))
    assert torch.equal(verified[: 1 + num_right], torch.cat(single))
    at = 6 + num_right
    next_token = tokens(8, 9, rows_of([(0, at, 1)], CPU, recalls={0: num_right} if num_right else {}))
    assert torch.equal(next_token, tokens(8, 9, step([(1, at, 1)])))
    assert torch.equal(memory[0], memory[1])
