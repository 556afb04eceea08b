"""What the tests of ops share: providers, the cases of a grid, packed weights, and the declared tolerances."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from troth.ops.codes import FP8
from troth.ops.experts import RawExperts, pack_experts
from troth.ops.grid import Inputs, RowSpec, rows_of
from troth.ops.layer_kv import LayerKV
from troth.ops.linear import PACKERS, RawLinearWeight, pack
from troth.ops.registry import Op
from troth.ops.rows import Rows

CPU = torch.device("cpu")
FLOATS = [pytest.param(torch.float32, id="f32"), pytest.param(torch.bfloat16, id="bf16")]


def providers(op: Op[Any, Any]) -> list[str]:
    """Names of all registered providers."""
    return sorted(op.implementations)


def cases(op: Op[Any, Any], *, timed: bool = False) -> list[Any]:
    """The op's cases for tests, or those for benchmarks."""
    return [pytest.param(case, id=case.name) for case in op.grid() if case.timed == timed]


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Numbers on the CPU."""
    return Inputs(dtype, CPU, seed)


def step(specs: list[RowSpec]) -> Rows:
    """A step's rows on the CPU."""
    return rows_of(specs, CPU)


def run(op: Op[Any, Any], provider: str, *args: Any) -> Any:
    """One provider's result, without a fallback; skips where it says that these arguments are not its own."""
    implementation = op.implementations[provider]
    if not implementation.supports(*args):
        pytest.skip(f"{op.name}: {provider} does not take these arguments")
    return implementation.run(*args)


def packed(provider: str, weight: RawLinearWeight, dtype: torch.dtype) -> Any:
    """The weight in the provider's form; skips where it has none for it."""
    form = PACKERS[provider](weight.parts, dtype, CPU)
    if form is None:
        pytest.skip(f"{provider} does not pack these weights")
    return form


def packed_arguments(arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments with every weight in the form of the first active provider that wants it, as a model has it."""

    def in_form(argument: Any) -> Any:
        if isinstance(argument, RawExperts):
            return pack_experts(argument, dtype, CPU)
        return pack(argument.parts, dtype, CPU) if isinstance(argument, RawLinearWeight) else argument

    return tuple(map(in_form, arguments))


def tensors(arguments: tuple[Any, ...]) -> list[Tensor]:
    """Those among the arguments, and those of a cache among them."""
    held = [getattr(a, f.name) for a in arguments if isinstance(a, LayerKV) for f in fields(a)]
    return [a for a in (*arguments, *held) if isinstance(a, Tensor)]


def assert_close(op: Op[Any, Any], got: Tensor, want: Tensor) -> None:
    """Within the op's declared tolerance, and of the same dtype and shape."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    within = op.tolerances[want.dtype].holds(got, want)
    if not within.all():
        error = (got.double() - want.double()).abs()
        worst = f"the worst by {error.nan_to_num(nan=torch.inf).max()}, of size {want.double().abs().max()}"
        raise AssertionError(f"{int((~within).sum())} values off, {worst}")


def assert_same_cache(op: Op[Any, Any], ours: LayerKV, wanted: LayerKV) -> None:
    """The same slots written, with the same numbers within the op's tolerance; codes may be neighbours."""
    for got, want in zip(tensors((ours,)), tensors((wanted,)), strict=True):
        assert torch.equal(got.float().isnan(), want.float().isnan()), "slots of other tokens were touched"
        if got.dtype in op.tolerances:
            assert_close(op, got.nan_to_num(), want.nan_to_num())
        else:
            # A number between two codes may go either way.
            numbers = want.float().nan_to_num()
            step = (numbers.abs() / 8).clamp(min=2**-9) if want.dtype == FP8 else 1.0
            assert ((got.float().nan_to_num() - numbers).abs() <= step).all()
