"""The gated delta rule: providers against the token by token reference, and what the rule promises."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.op_cases import FLOATS, assert_close, cases, inputs, providers, run, step
from troth.ops.gated_delta import arguments, gated_delta
from troth.ops.grid import Case

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(gated_delta))
@pytest.mark.parametrize("provider", providers(gated_delta))
def test_gated_delta_equals_the_reference_and_touches_its_rows_only(
    provider: str, case: Case, dtype: torch.dtype
) -> None:
    args, args_want = case.make(inputs(dtype)), case.make(inputs(dtype))
    got, want = run(gated_delta, provider, *args), gated_delta.reference(*args_want)
    state_got, state_want = args[4], args_want[4]
    assert_close(gated_delta, got, want)
    assert torch.equal(state_got.isnan(), state_want.isnan()), "states of other rows were touched"
    assert_close(gated_delta, state_got.nan_to_num(), state_want.nan_to_num())


def test_gated_delta_reference_follows_the_recurrence() -> None:
    """Token by token in float64, from the rule as it is written down."""
    args = arguments([(2, 5, 20)], (2, 4, 8, 6), inputs())
    qkv, _, log_decay, beta, memory, _ = args
    s = memory[2].double()
    got = gated_delta.reference(*args)
    q, k = (qkv[:, i * 16 : (i + 1) * 16].double().view(20, 2, 8) for i in range(2))
    v = qkv[:, 32:].double().view(20, 4, 6)
    for t in range(20):
        for h in range(4):
            unit_q, unit_k = (x[t, h // 2] / (x[t, h // 2].square().sum() + 1e-6).sqrt() for x in (q, k))
            s[h] *= log_decay[t, h].double().exp()
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
    out = call(qkv, 1, torch.zeros(4, 1), torch.ones(4, 1), memory, step([(0, 0, 4)]))[:, 0] * 4
    nothing = torch.zeros(16)
    torch.testing.assert_close(out, torch.stack((nothing, first, second, between)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 98), (64, 36), (37, 63), (99, 1)])
def test_gated_delta_in_chunks_equals_the_whole(sizes: tuple[int, ...]) -> None:
    args = arguments([(0, 0, 100)], (2, 4, 32, 16), inputs())
    qkv, _, log_decay, beta, memory, _ = args
    whole = gated_delta(*args)
    parts, begin = [], 0
    for size in sizes:
        at = slice(begin, begin + size)
        parts.append(gated_delta(qkv[at], 2, log_decay[at], beta[at], memory, step([(1, begin, size)])))
        begin += size
    assert_close(gated_delta, torch.cat(parts), whole)
    assert_close(gated_delta, memory[1], memory[0])
