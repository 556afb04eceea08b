"""Group-affine weights: what they stand for, and that the kernels read them to the number."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.op_cases import inputs, packed, providers, run
from troth.ops.embedding import embedding
from troth.ops.impl import cpu
from troth.ops.linear import AFFINE_FORMS, RawLinearWeight, linear, random_weight
from troth.weights.affine import AffineTensor

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")


def numbered(bits: int, outputs: int, inputs: int, group_values: int) -> AffineTensor:
    """Neighbouring sixteens differ in every code, neighbouring groups in scale and minimum: no two can be exchanged."""
    place = torch.arange(outputs * inputs)
    codes_OI = ((place * 7 + place // 16 * 5) % 2**bits).to(torch.uint8).view(outputs, inputs)
    groups = torch.arange(outputs * (inputs // group_values), dtype=torch.float32).view(outputs, -1)
    return AffineTensor(bits, codes_OI, 0.5 + groups / 64, -groups - 1)


def test_value_is_scale_times_code_plus_minimum_of_its_own_group() -> None:
    weight = AffineTensor(
        8,
        torch.arange(64, dtype=torch.uint8).view(1, 64) + 190,
        torch.tensor([[0.5, -2.0]]),
        torch.tensor([[1.0, 3.0]]),
    )
    values = weight.dequantize()
    assert values[0, 0] == 0.5 * 190 + 1
    assert values[0, 31] == 0.5 * 221 + 1
    assert values[0, 32] == -2.0 * 222 + 3
    assert values[0, 63] == -2.0 * 253 + 3
    assert (weight.shape, weight.group_values, weight.num_bytes) == ((1, 64), 32, 64 + 16)


@pytest.mark.parametrize("form", AFFINE_FORMS)
def test_block_of_the_kernels_has_every_code_once_and_its_group_before_it(form: str) -> None:
    bits, group_values = AFFINE_FORMS[form]
    weight = numbered(bits, 3, 256, group_values)
    blocks = weight.blocks().view(3, 256 // group_values, 8 + group_values * bits // 8)
    header = blocks[..., :8].contiguous().view(torch.float32)
    assert torch.equal(header[..., 0], weight.scale_ON)
    assert torch.equal(header[..., 1], weight.minimum_ON)
    codes = blocks[..., 8:].unflatten(-1, (-1, 4 * bits))
    if bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    assert torch.equal(codes.reshape(3, 256), weight.codes_OI)


@pytest.mark.parametrize("form", AFFINE_FORMS)
def test_every_code_and_group_comes_out_of_the_packed_rows_to_the_bit(form: str) -> None:
    """The embedding reads single rows: 19 of them, so that a group of 16 is not full."""
    bits, group_values = AFFINE_FORMS[form]
    raw = RawLinearWeight((numbered(bits, 19, 384, group_values),))
    ids = torch.arange(19)
    for provider in providers(embedding):
        got = run(embedding, provider, ids, packed(provider, raw, torch.float32), torch.float32)
        assert torch.equal(got, raw.parts[0].dequantize()), provider  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_integers_and_scales_of_bfloat16_are_exact(bits: int) -> None:
    """What AWQ, GPTQ (integer zero points) and MLX (bfloat16 scales) hold: no number is rounded on the way."""
    scale = torch.tensor([[0.0123, 3.7]]).bfloat16().float()
    zero = torch.tensor([[5.0, 2.0**bits - 1]])
    codes = (torch.arange(64) % 2**bits).to(torch.uint8).view(1, 64)
    raw = RawLinearWeight((AffineTensor(bits, codes, scale, -scale * zero),))
    want = (codes.double().view(1, 2, 32) - zero.double().unsqueeze(-1)) * scale.double().unsqueeze(-1)
    for provider in providers(embedding):
        got = run(embedding, provider, torch.tensor([0]), packed(provider, raw, torch.float32), torch.float32)
        assert torch.equal(got.double(), want.flatten(1)), provider


@pytest.mark.skipif(cpu.unavailable() is not None, reason="no C++ kernels")
def test_kernels_take_affine_weights_in_16_bits_of_input_and_the_bytes_they_say() -> None:
    raw = RawLinearWeight((random_weight(inputs(), "A8-128", (32, 256)), random_weight(inputs(), "A4-64", (5, 256))))
    form = packed("cpu", raw, torch.float32)
    assert form.shape == (37, 256)
    assert form.num_bytes == 2 * 2 * (128 + 4 * 512) + 4 * (128 + 2 * 256)
    x_TI = inputs(seed=1).normal(5, 256)
    got, want = run(linear, "cpu", x_TI, form), linear.reference(x_TI, raw)
    assert linear.tolerances[torch.float32].holds(got, want).all()


@pytest.mark.parametrize(
    ("bits", "codes", "scale"),
    [(3, (2, 64), (2, 2)), (8, (2, 64), (2, 4)), (8, (2, 64), (3, 2)), (8, (2, 96), (2, 2)), (4, (2, 64), (2, 0))],
)
def test_other_groups_are_no_affine_weight(bits: int, codes: tuple[int, int], scale: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        AffineTensor(bits, torch.zeros(codes, dtype=torch.uint8), torch.ones(scale), torch.ones(scale))


def test_code_of_more_bits_is_not_packed_into_its_neighbour() -> None:
    weight = AffineTensor(4, torch.full((1, 32), 16, dtype=torch.uint8), torch.ones(1, 1), torch.zeros(1, 1))
    with pytest.raises(AssertionError, match="more bits"):
        weight.blocks()
