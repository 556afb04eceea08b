"""Products with packed weights and rows of embedding tables: every provider and form against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cpu.op_cases import CPU, FLOATS, assert_close, cases, inputs, packed, providers, run
from troth.ops.embedding import embedding
from troth.ops.grid import Case
from troth.ops.impl import cpu
from troth.ops.linear import FORMS, RawLinearWeight, RawWeight, linear, pack, random_weight

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


def weight(form: str, outputs: int, width: int) -> RawWeight:
    return random_weight(inputs(), form, (outputs, width))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(linear))
@pytest.mark.parametrize("provider", providers(linear))
def test_linear_equals_the_reference(provider: str, case: Case, dtype: torch.dtype) -> None:
    x_TI, raw, bias_O = case.make(inputs(dtype))
    got = run(linear, provider, x_TI, packed(provider, raw, dtype), bias_O)
    assert_close(linear, got, linear.reference(x_TI, raw, bias_O))


def test_linear_grid_has_every_quantised_format_that_the_kernels_read() -> None:
    assert {kind.name for kind in cpu.FORMATS} <= set(FORMS)


@pytest.mark.parametrize("form", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("provider", providers(linear))
def test_linear_keeps_its_exact_tokens_exact_whatever_follows_them(provider: str, form: str) -> None:
    """Tokens past ``num_exact`` may be rounded to bfloat16, no further; those before it must not notice."""
    raw = RawLinearWeight((weight(form, 130, 512),))
    x_TI = inputs(seed=1).normal(17, 512)
    want = linear.reference(x_TI, raw)
    got = run(linear, provider, x_TI, packed(provider, raw, torch.float32), None, 3)
    assert_close(linear, got[:3], want[:3])
    assert linear.tolerances[torch.bfloat16].holds(got[3:], want[3:]).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("provider", providers(linear))
def test_linear_puts_stacked_weights_side_by_side(provider: str, dtype: torch.dtype) -> None:
    parts = (weight("Q8_0", 5, 64), weight("Q8_0", 3, 64), weight("F32", 7, 64))
    x_TI = inputs(dtype, seed=1).normal(4, 64)
    stacked = packed(provider, RawLinearWeight(parts), dtype)
    assert stacked.shape == (15, 64)
    want = torch.cat([linear.reference(x_TI, RawLinearWeight((part,))) for part in parts], dim=-1)
    assert_close(linear, run(linear, provider, x_TI, stacked), want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", cases(embedding))
@pytest.mark.parametrize("provider", providers(embedding))
def test_embedding_equals_the_reference(provider: str, case: Case, dtype: torch.dtype) -> None:
    ids_T, raw, *rest = case.make(inputs(dtype))
    got = run(embedding, provider, ids_T, packed(provider, raw, dtype), *rest)
    assert_close(embedding, got, embedding.reference(ids_T, raw, *rest))


def test_embedding_reference_is_the_row_of_the_table() -> None:
    table: Tensor = torch.randn(9, 32)
    got = embedding.reference(torch.tensor([3, 8]), RawLinearWeight((table,)), torch.float32)
    assert torch.equal(got, table[[3, 8]])


def test_pack_without_providers_keeps_the_weights_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_active", ())
    parts = [weight("Q8_0", 5, 64), weight("F32", 3, 64)]
    form = pack(parts, torch.float32, CPU)
    assert isinstance(form, RawLinearWeight)
    assert form.parts == tuple(parts)
    assert form.shape == (8, 64)
    assert form.num_bytes == 5 * 2 * 34 + 3 * 64 * 4


@pytest.mark.parametrize("provider", providers(linear))
def test_packed_weight_tells_the_bytes_it_takes(provider: str) -> None:
    form = packed(provider, RawLinearWeight((weight("F32", 6, 64),)), torch.float32)
    assert form.num_bytes == 6 * 64 * 4
    assert form.shape == (6, 64)
