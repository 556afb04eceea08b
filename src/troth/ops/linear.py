"""Matrix products with a model's weights, whatever form they are held in.

Legend: T tokens, I inputs, O outputs.

Weights come from the artifact as rows of numbers (``Tensor``), of quantised blocks (``QuantTensor``) or of affine
groups (``AffineTensor``), or they are to be rounded (``Fp8Tensor``): then each token's inputs are rounded as well,
whatever the tokens beside it. ``pack`` asks the active providers, in order, to turn one or more of them, stacked along
O, into the form they compute with; that happens once, at load. What nobody packs stays as it is and runs through the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from troth.artifact.ggml_types import GgmlType
from troth.ops.codes import FP8, to_codes
from troth.ops.grid import Case, Inputs, sizes
from troth.ops.registry import Tolerance, op
from troth.weights.affine import BITS, GROUP_VALUES, AffineTensor
from troth.weights.fp8 import Fp8Tensor
from troth.weights.quantized import QuantTensor
from troth.weights.upload import placed

RawWeight = Tensor | QuantTensor | AffineTensor | Fp8Tensor


class LinearWeight(Protocol):
    """A weight in the form one provider computes with."""

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""

    @property
    def num_bytes(self) -> int:
        """Bytes it occupies in memory."""


@dataclass(frozen=True, slots=True)
class RawLinearWeight:
    """Weights as the artifact holds them, stacked along O."""

    parts: tuple[RawWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, and in memory as far as they were read."""
        return sum(raw_bytes(part) for part in self.parts)


Packer = Callable[[Sequence[RawWeight], torch.dtype, torch.device], LinearWeight | None]
PACKERS: Final[dict[str, Packer]] = {}
"""Provider name -> packer; None from a packer means: not this weight."""

_DENSE_FORMS: Final = ("F32", "F16", "BF16")
_QUANTISED_FORMS: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
AFFINE_FORMS: Final[dict[str, tuple[int, int]]] = {
    f"A{bits}-{values}": (bits, values) for bits, values in product(BITS, GROUP_VALUES)
}
"""Bits of a code and values of a group, by name."""
FORMS: Final = (*_DENSE_FORMS, *_QUANTISED_FORMS, *AFFINE_FORMS)
"""Weights of the grid: numbers and the commonest quantised blocks, by their GGML type, and affine groups."""
FP8_FORM: Final = "FP8"
"""Those that are rounded at load."""
ROUNDED_TOGETHER: Final = 32
"""Inputs that share a scale where quantised weights round them."""
_ROUNDED_INPUTS: Final = "-int8"
ROUNDING_FORMS: Final = tuple(form + _ROUNDED_INPUTS for form in _QUANTISED_FORMS if form != "Q8_0")
"""Forms whose inputs are rounded."""
_SHAPES: Final = ((1, 1), (3, 2), (33, 3), (130, 18))
"""Outputs, and inputs in blocks."""
_FP8_SHAPES: Final = ((5, 24), (33, 96), (144, 576))
_TIMED_SHAPE: Final = (9728, 2560)
_TIMED_FORMS: Final = ("BF16", FP8_FORM, "Q8_0", "Q4_K", "Q4_K" + _ROUNDED_INPUTS, "A4-64", "A8-64")


def _grid() -> Iterator[Case]:
    for form, (outputs, blocks), num_tokens in product((*FORMS, *ROUNDING_FORMS), _SHAPES, (1, 2, 17)):
        shape = (outputs, blocks * max(32, _block_values(form)))
        # One bias per shape: it is added the same way, however many tokens there are.
        name = f"{form}-{sizes(*shape)}-{num_tokens}" + ("-bias" if num_tokens == 2 else "")
        yield Case(name, partial(_arguments, form, shape, num_tokens, num_tokens == 2))
    for shape, num_tokens in product(_FP8_SHAPES, (1, 2, 17, 35)):
        name = f"{FP8_FORM}-{sizes(*shape)}-{num_tokens}" + ("-bias" if num_tokens == 2 else "")
        yield Case(name, partial(_arguments, FP8_FORM, shape, num_tokens, num_tokens == 2))
    for form, num_tokens in product(_TIMED_FORMS, (1, 8, 256)):
        name = f"{form}-{sizes(*_TIMED_SHAPE)}-{num_tokens}"
        yield Case(name, partial(_arguments, form, _TIMED_SHAPE, num_tokens, False), timed=True)


@op(
    tolerances={
        torch.float32: Tolerance(
            1e-4, 1e-4, "sums of a few thousand products in another order, inputs of 16 bits, or of 8 on both sides"
        ),
        torch.bfloat16: Tolerance(3e-2, 2e-2, "weights and output rounded to 8 bits of mantissa"),
        torch.float16: Tolerance(4e-3, 4e-3, "weights and output rounded to 11 bits of mantissa"),
    },
    grid=_grid,
)
def linear(x_TI: Tensor, weight: Any, bias_O: Tensor | None = None, num_exact: int | None = None) -> Tensor:
    """x @ weight^T + bias.

    Args:
        x_TI: float [T, I].
        weight: a LinearWeight of shape (O, I). The reference knows RawLinearWeight. Of a stack all are rounded to fp8
            or none is; if they are, so is each token of x, as ``ops/codes.py`` says. Quantised ones whose ``inputs``
            are int8 meet each 32 inputs of a token as codes with a scale of their own.
        bias_O: float [O] of the dtype of x, or None.
        num_exact: tokens at the head that take the exact way where a provider has a faster one for the rest
            (``Rows.num_exact``); None: all of them.

    Returns:
        float [T, O], dtype of x; accumulated in float32, rounded once.
    """
    x_TI, dtype = x_TI.float(), x_TI.dtype
    products = [_as_met(x_TI, part) @ dense(part, torch.float32, x_TI.device).T for part in weight.parts]
    y_TO = torch.cat(products, dim=-1)
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(dtype)


def _as_met(x_TI: Tensor, part: RawWeight) -> Tensor:
    """Inputs in the numbers in which a weight meets them."""
    if isinstance(part, QuantTensor) and part.inputs is not None:
        codes, scale = to_codes(x_TI.unflatten(-1, (-1, ROUNDED_TOGETHER)), part.inputs)
        return (codes.float() * scale.unsqueeze(-1)).flatten(-2)
    if not isinstance(part, Fp8Tensor):
        return x_TI
    codes_TI, scale_T = to_codes(x_TI, FP8)
    return codes_TI.float() * scale_T.unsqueeze(-1)


def pack(parts: Sequence[RawWeight], dtype: torch.dtype, device: torch.device) -> LinearWeight:
    """Stack weights along O and hand them to the first active provider that wants them.

    Args:
        parts: (O_i, I) each, the same I.
        dtype: of the activations they will meet.
        device: where they will be used.
    """
    for provider in linear.active:
        packed = PACKERS[provider](parts, dtype, device) if provider in PACKERS else None
        if packed is not None:
            return packed
    return RawLinearWeight(tuple(parts))


def dense(part: RawWeight, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One weight as an ordinary tensor [O, I]."""
    if isinstance(part, QuantTensor | AffineTensor):
        return part.dequantize(dtype).to(device)
    if isinstance(part, Fp8Tensor):
        codes_OI, scale_O = to_codes(dense(part.stored, part.stored.dtype, device), FP8)
        return (codes_OI.float() * scale_O.unsqueeze(-1)).to(dtype)
    return placed(part, dtype, device)


def raw_bytes(part: RawWeight) -> int:
    """Bytes of one weight in the form the artifact holds it."""
    return part.nbytes if isinstance(part, Tensor) else part.num_bytes


_SCALES: Final[dict[GgmlType, slice]] = {
    **dict.fromkeys((GgmlType.Q4_0, GgmlType.Q5_0, GgmlType.Q8_0), slice(0, 2)),
    **dict.fromkeys((GgmlType.Q4_1, GgmlType.Q5_1, GgmlType.Q4_K, GgmlType.Q5_K), slice(0, 4)),
    GgmlType.Q6_K: slice(208, 210),
}
"""The bytes of a block that are float16: its scale, and its minimum if it has one (layouts: ggml-common.h)."""


def random_weight(inputs: Inputs, form: str, shape: tuple[int, int]) -> RawWeight:
    """A matrix (O, I) of one of ``FORMS``, or to be rounded, or that rounds its inputs (the form and ``-int8``).

    Products with normal inputs are of about unit size.

    Quantised blocks are any bytes but for their scales, so that every bit of the format is in use.
    """
    outputs, width = shape
    if form in _DENSE_FORMS:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[form]
        return (inputs.normal(outputs, width, dtype=torch.float32) * width**-0.5).to(dtype)
    if form == FP8_FORM:
        return Fp8Tensor((inputs.normal(outputs, width, dtype=torch.float32) * width**-0.5).bfloat16())
    if form in AFFINE_FORMS:
        return _random_affine(inputs, *AFFINE_FORMS[form], shape)
    ggml_type = GgmlType[form.removesuffix(_ROUNDED_INPUTS)]
    blocks = inputs.bytes(outputs, width // ggml_type.block_size, ggml_type.block_bytes)
    scale = blocks[:, :, _SCALES[ggml_type]].view(torch.float16)
    rounded = torch.int8 if form.endswith(_ROUNDED_INPUTS) else None
    weight = QuantTensor(ggml_type, shape, blocks.flatten(1), rounded)
    scale.copy_(inputs.bytes(*scale.shape) % 2 * 2.0 - 1.0)
    scale.mul_(width**-0.5 / weight.rows(torch.arange(min(outputs, 16))).std())
    return weight


def _random_affine(inputs: Inputs, bits: int, group_values: int, shape: tuple[int, int]) -> AffineTensor:
    """Any codes, scales of either sign that float16 holds, and minima that put the middle code near 0."""
    outputs, width = shape
    codes_OI = inputs.bytes(outputs, width) >> (8 - bits)
    signs_ON = inputs.bytes(outputs, width // group_values) % 2 * 2.0 - 1.0
    scale_ON = (signs_ON * (width**-0.5 / 2 ** (bits - 1) * 3**0.5)).half().float()
    offset_ON = inputs.bytes(outputs, width // group_values).float() / 256 - 0.5
    return AffineTensor(bits, codes_OI, scale_ON, -scale_ON * (2 ** (bits - 1) + offset_ON))


def _block_values(form: str) -> int:
    """Values that a row of a form holds a multiple of."""
    return AFFINE_FORMS[form][1] if form in AFFINE_FORMS else GgmlType[form.removesuffix(_ROUNDED_INPUTS)].block_size


def _arguments(form: str, shape: tuple[int, int], num_tokens: int, with_bias: bool, inputs: Inputs) -> tuple[Any, ...]:
    weight = RawLinearWeight((random_weight(inputs, form, shape),))
    return inputs.normal(num_tokens, shape[1]), weight, inputs.normal(shape[0]) if with_bias else None
