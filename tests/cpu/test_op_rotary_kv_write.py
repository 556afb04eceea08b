"""Head split, norms, rotation and cache write: providers against the reference, the reference against the formula."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cpu.op_cases import FLOATS, assert_close, cases, inputs, providers, run, step
from troth.contracts.names import BLOCK_TOKENS
from troth.ops.attention import paged_kv
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
    kv, kv_want = args[-1], args_want[-1]
    for ours, wanted in ((kv.k_NKDS, kv_want.k_NKDS), (kv.v_NKSD, kv_want.v_NKSD)):
        assert torch.equal(ours.isnan(), wanted.isnan()), "slots of other tokens were touched"
        assert_close(rotary_kv_write, ours.nan_to_num(), wanted.nan_to_num())


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
