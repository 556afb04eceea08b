"""Head split, norms, rotation and cache write: providers against the reference, the reference against the formula."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cpu.op_cases import FLOATS, assert_close, assert_same_cache, cases, inputs, providers, run, step
from troth.contracts.names import BLOCK_TOKENS
from troth.ops.attention import paged_kv
from troth.ops.codes import LARGEST
from troth.ops.grid import Case
from troth.ops.rotary_kv_write import RotaryTable, rotary_kv_write

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(rotary_kv_write))
@pytest.mark.parametrize("provider", providers(rotary_kv_write))
def test_rotary_kv_write_equals_the_reference_and_writes_its_slots_only(
    provider: str, case: Case, dtype: torch.dtype
) -> None:
    args, args_want = case.make(inputs(dtype)), case.make(inputs(dtype))
    got, want = run(rotary_kv_write, provider, *args), rotary_kv_write.reference(*args_want)
    assert_close(rotary_kv_write, got, want)
    assert_same_cache(rotary_kv_write, args[-1], args_want[-1])


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("provider", providers(rotary_kv_write))
def test_rotary_kv_write_keeps_numbers_within_half_a_step(provider: str, dtype: torch.dtype) -> None:
    """Keys as large as they like beside small ones: each has a scale of its own; zeros stay zeros."""
    kv, _, slots_T = paged_kv(inputs(), step([(0, 0, 4)]), 2, 32, dtype=dtype)
    qkv_TE = inputs().normal(4, 5 * 32) * torch.tensor([[1e-6], [1.0], [1e6], [0.0]])
    still = RotaryTable(torch.ones(4, 16), torch.zeros(4, 16))
    run(rotary_kv_write, provider, qkv_TE, 1, torch.arange(4), still, None, slots_T, kv)
    _, k_TKD, v_TKD = qkv_TE.view(4, 5, 32).split([1, 2, 2], dim=1)
    block_T, offset_T = slots_T // BLOCK_TOKENS, slots_T % BLOCK_TOKENS
    for got, want in (
        (kv.keys(block_T)[torch.arange(4), :, :, offset_T], k_TKD),
        (kv.values(block_T)[torch.arange(4), :, offset_T], v_TKD),
    ):
        scale_TK1 = want.abs().amax(dim=-1, keepdim=True) / LARGEST[dtype]
        half_step = scale_TK1 / 2 if dtype == torch.int8 else torch.maximum(want.abs() / 16, scale_TK1 * 2**-10)
        assert ((got - want).abs() <= half_step * 1.0001).all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("provider", providers(rotary_kv_write))
def test_rotary_kv_write_shows_in_codes_what_is_not_finite(provider: str, dtype: torch.dtype, wrong: float) -> None:
    kv, _, slots_T = paged_kv(inputs(), step([(0, 0, 1)]), 1, 32, dtype=dtype)
    qkv_TE = inputs().normal(1, 3 * 32)
    qkv_TE[0, 90] = wrong
    still = RotaryTable(torch.ones(1, 16), torch.zeros(1, 16))
    run(rotary_kv_write, provider, qkv_TE, 1, torch.zeros(1).long(), still, None, slots_T, kv)
    assert kv.keys(slots_T // BLOCK_TOKENS)[0, 0, :, slots_T[0] % BLOCK_TOKENS].isfinite().all()
    assert kv.values(slots_T // BLOCK_TOKENS)[0, 0, slots_T[0] % BLOCK_TOKENS].isnan().all()


def test_rotary_kv_write_turns_pairs_of_halves_and_keeps_values() -> None:
    """One head of four values: (x0, x2) turn by the first angle, (x1, x3) by the second."""
    kv, _, slots_T = paged_kv(inputs(), step([(0, 3, 1)]), 1, 4)
    angles = torch.arange(8)[:, None] * torch.tensor([0.7, 0.2])
    qkv = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])
    rotary = RotaryTable(angles.cos(), angles.sin())
    q = rotary_kv_write.reference(qkv, 1, torch.tensor([3]), rotary, None, slots_T, kv)[0, 0]

    def turned(a: float, b: float, angle: float) -> list[float]:
        return [a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)]

    assert q[[0, 2]].tolist() == pytest.approx(turned(1, 3, 2.1), rel=1e-5)
    assert q[[1, 3]].tolist() == pytest.approx(turned(2, 4, 0.6), rel=1e-5)
    block, offset = int(slots_T[0]) // BLOCK_TOKENS, int(slots_T[0]) % BLOCK_TOKENS
    assert kv.k_NKDS[block, 0, [0, 2], offset].tolist() == pytest.approx(turned(5, 7, 2.1), rel=1e-5)
    assert kv.v_NKSD[block, 0, offset].tolist() == [9, 10, 11, 12]
