"""Head split, norms, rotation and cache write: providers against the reference, the reference against the formula."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cpu.op_cases import FLOATS, assert_close, copy_of, paged_kv, providers, run, step
from troth.contracts.names import BLOCK_TOKENS
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

ROWS = [(1, 14, 1), (0, 0, 1), (2, 13, 20)]
HEADS = [(1, 1, 32), (4, 2, 64), (9, 3, 80), (8, 1, 256)]


def table(width: int) -> RotaryTable:
    angle = torch.arange(64)[:, None] * 0.5 ** torch.arange(width)
    return RotaryTable(angle.cos() * 1.1, angle.sin() * 1.1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("share", [1.0, 0.5], ids=["whole", "half"])
@pytest.mark.parametrize("strided", [False, True], ids=["packed", "strided"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("provider", providers(rotary_kv_write))
def test_rotary_kv_write_equals_the_reference(
    provider: str,
    heads: tuple[int, int, int],
    strided: bool,
    share: float,
    with_norms: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = heads
    rows = step(ROWS)
    kv, _, slots_T = paged_kv(rows, num_kv_heads, head_dim, dtype)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv_TE = torch.randn(len(slots_T), width + 8 * strided).to(dtype)[:, :width]
    norms = HeadNorms(torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5, 1e-6) if with_norms else None
    positions_T = torch.cat([torch.arange(start, start + n) for _, start, n in ROWS])
    args = (num_heads, positions_T, table(int(head_dim * share) // 2), norms, slots_T)
    kv_got, kv_want, qkv_before = copy_of(kv), copy_of(kv), qkv_TE.clone()
    got = run(rotary_kv_write, provider, qkv_TE, *args, kv_got)
    assert_close(rotary_kv_write, got, rotary_kv_write.reference(qkv_before, *args, kv_want))
    for ours, wanted in ((kv_got.k_NKDS, kv_want.k_NKDS), (kv_got.v_NKSD, kv_want.v_NKSD)):
        assert torch.equal(ours.isnan(), wanted.isnan()), "slots of other tokens were touched"
        assert_close(rotary_kv_write, ours.nan_to_num(), wanted.nan_to_num())


def test_rotary_kv_write_turns_pairs_of_halves_and_keeps_values() -> None:
    """One head of four values: (x0, x2) turn by the first angle, (x1, x3) by the second."""
    kv, _, slots_T = paged_kv(step([(0, 3, 1)]), 1, 4, torch.float32)
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
