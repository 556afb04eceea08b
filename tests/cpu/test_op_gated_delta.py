"""The gated delta rule: providers against the token by token reference, and what the rule promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cpu.op_cases import FLOATS, RowSpec, assert_close, providers, run, step
from troth.ops.gated_delta import gated_delta

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

MAX_ROWS = 5
STEPS: dict[str, list[RowSpec]] = {
    "one-single": [(3, 9, 1)],
    "first-token": [(2, 0, 1)],
    "neighbours": [(1, 4, 1), (2, 0, 1), (3, 7, 1)],
    "scattered-singles": [(4, 3, 1), (0, 0, 1), (2, 1, 1)],
    "prompt": [(1, 0, 63)],
    "one-chunk-prompt": [(1, 0, 64)],
    "continued-prompt": [(1, 7, 65)],
    "three-chunks": [(1, 1, 150)],
    "mixed": [(4, 2, 1), (1, 0, 1), (0, 0, 17), (3, 1, 70)],
}
HEADS = [(1, 1, 32, 32), (2, 4, 16, 24), (3, 9, 64, 64), (2, 2, 128, 128)]
"""Key heads, value heads, key size, value size."""


def inputs(num_tokens: int, heads: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; log decays from forgetting at once to hardly at all; learning rates."""
    key_heads, num_heads, key_dim, value_dim = heads
    # Shifted, so that the keys of a row are alike, as they are behind a SiLU.
    qkv = (torch.randn(num_tokens, 2 * key_heads * key_dim + num_heads * value_dim) + 0.7).to(dtype)
    log_decay = -torch.exp(torch.empty(num_tokens, num_heads).uniform_(-8, 1.5))
    return qkv, log_decay, torch.rand(num_tokens, num_heads)


def state(rows: list[RowSpec], heads: tuple[int, int, int, int]) -> Tensor:
    """What each row remembers; NaN in rows that start at 0 and in those that take no part."""
    memory = torch.full((MAX_ROWS, *heads[1:]), torch.nan)
    for row, start, _ in rows:
        if start > 0:
            memory[row] = torch.randn(heads[1:]) * 0.3
    return memory


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("specs", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("provider", providers(gated_delta))
def test_gated_delta_equals_the_reference(
    provider: str, specs: list[RowSpec], heads: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = step(specs)
    qkv, log_decay, beta = inputs(sum(rows.num_new), heads, dtype)
    before = state(specs, heads)
    state_got, state_want = before.clone(), before.clone()
    got = run(gated_delta, provider, qkv, heads[0], log_decay, beta, state_got, rows)
    want = gated_delta.reference(qkv, heads[0], log_decay, beta, state_want, rows)
    assert_close(gated_delta, got, want)
    assert torch.equal(state_got.isnan(), state_want.isnan()), "states of other rows were touched"
    assert_close(gated_delta, state_got.nan_to_num(), state_want.nan_to_num())


def test_gated_delta_reference_follows_the_recurrence() -> None:
    """Token by token in float64, from the rule as it is written down."""
    torch.manual_seed(0)
    heads = (2, 4, 8, 6)
    qkv, log_decay, beta = inputs(20, heads, torch.float32)
    memory = state([(2, 5, 20)], heads)
    s = memory[2].double()
    got = gated_delta.reference(qkv, 2, log_decay, beta, memory, step([(2, 5, 20)]))
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
    torch.manual_seed(0)
    heads = (2, 4, 32, 16)
    qkv, log_decay, beta = inputs(100, heads, torch.float32)
    memory = state([], heads)
    whole = gated_delta(qkv, 2, log_decay, beta, memory, step([(0, 0, 100)]))
    parts, begin = [], 0
    for size in sizes:
        at = slice(begin, begin + size)
        parts.append(gated_delta(qkv[at], 2, log_decay[at], beta[at], memory, step([(1, begin, size)])))
        begin += size
    assert_close(gated_delta, torch.cat(parts), whole)
    assert_close(gated_delta, memory[1], memory[0])
