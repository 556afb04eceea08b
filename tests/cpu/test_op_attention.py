"""Attention over a paged cache: every provider against the reference, the reference against dense softmax."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.op_cases import FLOATS, assert_close, cases, inputs, providers, run, step
from troth.contracts.names import BLOCK_TOKENS
from troth.ops.attention import attention, paged_kv
from troth.ops.grid import Case, RowSpec

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

MIXED: list[RowSpec] = [(3, 40, 1), (1, 3, 1), (0, 0, 33), (2, 30, 2)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(attention))
@pytest.mark.parametrize("provider", providers(attention))
def test_attention_equals_the_reference(provider: str, case: Case, dtype: torch.dtype) -> None:
    args = case.make(inputs(dtype))
    assert_close(attention, run(attention, provider, *args), attention.reference(*args))


@pytest.mark.parametrize("provider", providers(attention))
def test_attention_takes_a_cache_of_another_dtype(provider: str) -> None:
    rows = step(MIXED)
    kv, table_RB, slots_T = paged_kv(inputs(torch.bfloat16), rows, 2, 64)
    args = (inputs().normal(len(slots_T), 4, 64), kv, table_RB, rows, 0.125)
    assert_close(attention, run(attention, provider, *args), attention.reference(*args))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 9])
def test_attention_is_softmax_over_each_rows_own_context(window: int | None, softcap: float | None) -> None:
    """The reference, token by token in float64."""
    rows = step(MIXED)
    kv, table_RB, slots_T = paged_kv(inputs(), rows, 2, 32, window)
    q_THD = inputs(seed=1).normal(len(slots_T), 4, 32)
    keys = kv.k_NKDS.transpose(2, 3)
    got = attention.reference(q_THD, kv, table_RB, rows, 0.3, window, softcap)
    tokens = [(r, start + i) for r, start in enumerate(rows.starts) for i in range(rows.num_new[r])]
    for t, (r, position) in enumerate(tokens):
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        where = [(int(table_RB[r, p // BLOCK_TOKENS]), p % BLOCK_TOKENS) for p in seen]
        for h in range(4):
            k, v = (torch.stack([c[b, h // 2, s] for b, s in where]).double() for c in (keys, kv.v_NKSD))
            scores = k @ q_THD[t, h].double() * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            assert_close(attention, got[t, h], (scores.softmax(0) @ v).float())


@pytest.mark.parametrize("window", [None, 5])
def test_attention_keeps_rows_apart(window: int | None) -> None:
    """A row's outputs are the same alone and beside others, up to the order of sums."""
    rows = step(MIXED)
    kv, table_RB, slots_T = paged_kv(inputs(), rows, 2, 64, window)
    q_THD = inputs(seed=1).normal(len(slots_T), 4, 64)
    together = attention(q_THD, kv, table_RB, rows, 0.125, window)
    begin = 0
    for r, spec in enumerate(MIXED):
        end = begin + spec[2]
        alone = attention(q_THD[begin:end], kv, table_RB[r : r + 1], step([spec]), 0.125, window)
        assert_close(attention, together[begin:end], alone)
        begin = end
