"""Products with packed weights and rows of embedding tables: every provider and form against the reference."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cpu.op_cases import CPU, FLOATS, assert_close, providers, run
from troth.artifact.ggml_types import GgmlType
from troth.ops.embedding import embedding
from troth.ops.linear import PACKERS, RawLinearWeight, RawWeight, linear, pack
from troth.weights.quantized import QuantTensor

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

FORMS = ["float32", "bfloat16", "float16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"]
SHAPES = [(1, 32), (3, 64), (33, 96), (130, 576)]
"""(outputs, inputs)."""


def weight(form: str, rows: int, inputs: int) -> RawWeight:
    """A matrix whose products with unit inputs are of unit size."""
    values = torch.randn(rows, inputs) * inputs**-0.5
    if form in ("float32", "bfloat16", "float16"):
        return values.to(getattr(torch, form))
    raw = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[form])
    return QuantTensor(GgmlType[form], (rows, inputs), torch.from_numpy(np.ascontiguousarray(raw)))


def packed(provider: str, parts: list[RawWeight], dtype: torch.dtype) -> object:
    """The weight in the provider's form."""
    if provider not in PACKERS:
        pytest.skip(f"{provider} packs nothing")
    form = PACKERS[provider](parts, dtype, CPU)
    if form is None:
        pytest.skip(f"{provider} does not pack these weights")
    return form


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("provider", providers(linear))
def test_linear_equals_the_reference(
    provider: str, form: str, shape: tuple[int, int], num_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    part = weight(form, *shape)
    x_TI = torch.randn(num_tokens, shape[1]).to(dtype)
    got = run(linear, provider, x_TI, packed(provider, [part], dtype))
    assert_close(linear, got, linear.reference(x_TI, RawLinearWeight((part,))))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("provider", providers(linear))
def test_linear_puts_stacked_weights_side_by_side(provider: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [weight("Q8_0", 5, 64), weight("Q8_0", 3, 64), weight("float32", 7, 64)]
    x_TI = torch.randn(4, 64).to(dtype)
    stacked = packed(provider, parts, dtype)
    assert stacked.shape == (15, 64)  # type: ignore[attr-defined]
    want = torch.cat([linear.reference(x_TI, RawLinearWeight((part,))) for part in parts], dim=-1)
    assert_close(linear, run(linear, provider, x_TI, stacked), want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("provider", providers(embedding))
def test_embedding_copies_rows(provider: str, form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    part = weight(form, 29, 64)
    ids_T = torch.tensor([28, 0, 7, 7, 13])
    got = run(embedding, provider, ids_T, packed(provider, [part], dtype), dtype)
    assert torch.equal(got, embedding.reference(ids_T, RawLinearWeight((part,)), dtype))


def test_embedding_reference_is_the_row_of_the_table() -> None:
    table: Tensor = torch.randn(9, 32)
    got = embedding.reference(torch.tensor([3, 8]), RawLinearWeight((table,)), torch.float32)
    assert torch.equal(got, table[[3, 8]])


def test_pack_without_providers_keeps_the_weights_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_active", ())
    parts = [weight("Q8_0", 5, 64), weight("float32", 3, 64)]
    form = pack(parts, torch.float32, CPU)
    assert isinstance(form, RawLinearWeight)
    assert form.parts == tuple(parts)
    assert form.shape == (8, 64)
    assert form.num_bytes == 5 * 2 * 34 + 3 * 64 * 4


@pytest.mark.parametrize("provider", providers(linear))
def test_packed_weight_tells_the_bytes_it_takes(provider: str) -> None:
    form = packed(provider, [weight("float32", 6, 64)], torch.float32)
    assert form.num_bytes >= 6 * 64  # type: ignore[attr-defined]
    assert form.shape == (6, 64)  # type: ignore[attr-defined]
