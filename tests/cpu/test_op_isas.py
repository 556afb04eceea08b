"""Every instruction set that this processor can run computes what the references say.

What engines use is what the tests of each op run on; the others are run here.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.cpu.op_cases import assert_close, cases, inputs, packed, tensors
from troth.ops.attention import attention
from troth.ops.embedding import embedding
from troth.ops.gated_activation import gated_activation
from troth.ops.gated_delta import gated_delta
from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.grid import Case
from troth.ops.impl import cpu
from troth.ops.linear import FORMS, ROUNDING_FORMS, RawLinearWeight, linear, random_weight
from troth.ops.mask import mask
from troth.ops.registry import Op
from troth.ops.rms_norm import add_rms_norm, rms_norm
from troth.ops.rotary_kv_write import rotary_kv_write
from troth.ops.sample import sample
from troth.ops.short_conv import short_conv
from troth.ops.sigmoid_gate import sigmoid_gate

QUANTISED = [*(form for form in FORMS if form.startswith(("Q", "A"))), *ROUNDING_FORMS]
NAMES: list[str] = [] if cpu.unavailable() else cpu.instruction_sets()
OTHERS = [name for name in NAMES if name != cpu.exact_set()] if NAMES else []
pytestmark = [
    pytest.mark.usefixtures("fresh_memory_is_nan"),
    pytest.mark.skipif(not NAMES, reason="the kernels are not built"),
]


def on(isa: str, run: Callable[[], Any]) -> Any:
    """Run in a thread of its own, whose pool uses this instruction set."""

    def start_and_run() -> Any:
        cpu.start(2, isa)
        return run()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(start_and_run).result()


def grid(*ops: Op[Any, Any]) -> list[Any]:
    return [pytest.param(op, case.values[0], id=f"{op.name}-{case.id}") for op in ops for case in cases(op)]


@pytest.mark.parametrize("isa", OTHERS)
@pytest.mark.parametrize(
    ("op", "case"),
    grid(linear, embedding, attention, rms_norm, add_rms_norm, gated_activation, gated_rms_norm, sigmoid_gate, sample),
)
def test_op_equals_the_reference_on_an_instruction_set(isa: str, op: Op[Any, Any], case: Case) -> None:
    implementation = op.implementations["cpu"]

    def compute() -> Any:
        arguments = [
            packed("cpu", argument, torch.float32) if isinstance(argument, RawLinearWeight) else argument
            for argument in case.make(inputs())
        ]
        if not implementation.supports(*arguments):
            pytest.skip("cpu does not take these arguments")
        return implementation.run(*arguments)

    got, want = on(isa, compute), op.reference(*case.make(inputs()))
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    for ours, theirs in pairs:
        assert_close(op, ours, theirs)


@pytest.mark.parametrize("isa", OTHERS)
@pytest.mark.parametrize(("op", "case"), grid(mask, rotary_kv_write, short_conv))
def test_op_writes_what_the_reference_writes_on_an_instruction_set(isa: str, op: Op[Any, Any], case: Case) -> None:
    ours, wanted = case.make(inputs()), case.make(inputs())
    if not op.implementations["cpu"].supports(*ours):
        pytest.skip("cpu does not take these arguments")
    on(isa, lambda: op.implementations["cpu"].run(*ours))
    op.reference(*wanted)
    for got, want in zip(tensors(ours), tensors(wanted), strict=True):
        if want.dtype == torch.int8:  # a number between two steps may go either way
            assert (got.int() - want.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("isa", NAMES)
@pytest.mark.parametrize("case", cases(linear))
def test_prompt_products_are_rounded_to_bf16_at_most(isa: str, case: Case) -> None:
    """All tokens past ``num_exact``: the way of prompts."""
    x_TI, raw, bias_O = case.make(inputs())

    def compute() -> torch.Tensor:
        return linear.implementations["cpu"].run(x_TI, packed("cpu", raw, torch.float32), bias_O, 0)

    got, want = on(isa, compute), linear.reference(x_TI, raw, bias_O)
    dtype = torch.bfloat16 if isa in ("amx", "avx512bf16") else torch.float32
    assert linear.tolerances[dtype].holds(got, want).all()


@pytest.mark.parametrize("isa", NAMES)
@pytest.mark.parametrize("form", [*FORMS, *ROUNDING_FORMS])
def test_exact_product_of_a_token_has_the_same_bits_whoever_is_beside_it(isa: str, form: str) -> None:
    """However many tokens share what is decoded: a batch gives what single requests get."""
    raw = RawLinearWeight((random_weight(inputs(), form, (50, 512)),))
    x_TI = inputs(seed=1).normal(13, 512)

    def compute() -> list[torch.Tensor]:
        weight, run = packed("cpu", raw, torch.float32), linear.implementations["cpu"].run
        return [run(x_TI[:count], weight) for count in (1, 2, 3, 4, 5, 6, 7, 8, 13)]

    *parts, whole = on(isa, compute)
    for part in parts:
        assert torch.equal(part, whole[: len(part)])


@pytest.mark.parametrize("isa", NAMES)
@pytest.mark.parametrize("form", QUANTISED)
def test_quantised_product_of_a_prompt_has_the_bits_of_an_answer(isa: str, form: str) -> None:
    """More tokens than meet one group after the other; in bf16 prompts are rounded more coarsely."""
    if isa in ("amx", "avx512bf16") and form not in ROUNDING_FORMS:
        pytest.skip("prompts are multiplied in bf16")
    raw = RawLinearWeight((random_weight(inputs(), form, (18, 512)),))
    x_TI = inputs(seed=1).normal(300, 512)

    def compute() -> tuple[torch.Tensor, list[torch.Tensor]]:
        weight, run = packed("cpu", raw, torch.float32), linear.implementations["cpu"].run
        return run(x_TI, weight, None, 0), [run(x_TI[t : t + 1], weight) for t in (0, 203, 204, 299)]

    prompt, answers = on(isa, compute)
    assert torch.equal(prompt[[0, 203, 204, 299]], torch.cat(answers))


@pytest.mark.parametrize("isa", NAMES)
@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("num_tokens", [1, 3, 9])
def test_quantised_product_shows_what_is_not_finite_and_where(isa: str, form: str, num_tokens: int) -> None:
    raw = RawLinearWeight((random_weight(inputs(), form, (18, 512)),))
    x_TI = inputs(seed=1).normal(num_tokens, 512)
    x_TI[-1, 200] = float("inf") if num_tokens == 3 else float("nan")
    got = on(isa, lambda: linear.implementations["cpu"].run(x_TI, packed("cpu", raw, torch.float32)))
    assert not got[-1].isfinite().any()
    assert got[:-1].isfinite().all()


@pytest.mark.parametrize("isa", NAMES)
@pytest.mark.parametrize("form", QUANTISED)
@pytest.mark.parametrize("size", [3e-29, 1e-31, 0.0, 3e30])
def test_quantised_product_of_inputs_of_any_size_is_the_reference_s(isa: str, form: str, size: float) -> None:
    """An error relative to the largest input; what is too small to have an inverse is zero."""
    raw = RawLinearWeight((random_weight(inputs(), form, (18, 256)),))
    x_TI = inputs(seed=1).normal(2, 256) * size
    got = on(isa, lambda: linear.implementations["cpu"].run(x_TI, packed("cpu", raw, torch.float32)))
    want = linear.reference(x_TI, raw)
    assert got.isfinite().all()
    largest = float(want.abs().max())
    assert float((got - want).abs().max()) <= 1e-4 * largest + (2e-28 if size < 1e-30 else 0)


@pytest.mark.parametrize("isa", NAMES)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 40])
@pytest.mark.parametrize("num_exact", [None, 1])
def test_parts_that_round_inputs_lie_beside_parts_that_do_not(isa: str, num_tokens: int, num_exact: int | None) -> None:
    """Both forms of a token's inputs are made, side by side, once for all threads or by each."""
    forms = ("Q4_0-int8", "Q8_0", "Q5_1-int8", "F32", "Q4_0")
    parts = tuple(random_weight(inputs(seed=i), form, (32, 256)) for i, form in enumerate(forms))
    x_TI = inputs(seed=1).normal(num_tokens, 256)

    def compute() -> torch.Tensor:
        weight = packed("cpu", RawLinearWeight(parts), torch.float32)
        return linear.implementations["cpu"].run(x_TI, weight, None, num_exact)

    got, want = on(isa, compute), linear.reference(x_TI, RawLinearWeight(parts))
    if isa in ("amx", "avx512bf16") and num_exact:
        assert linear.tolerances[torch.bfloat16].holds(got, want).all()
        # Exact tokens, and parts that round their inputs, never go through bf16.
        kept = torch.ones_like(got, dtype=torch.bool)
        kept[num_exact:, 32:64] = kept[num_exact:, 96:] = False
        got, want = got[kept], want[kept]
    assert_close(linear, got, want)


@pytest.mark.parametrize("isa", OTHERS)
@pytest.mark.parametrize("name", ["mixed-3x9x64x64", "recall-and-verify-3x9x64x64", "continued-prompt-1x1x32x32"])
def test_gated_delta_equals_the_reference_on_an_instruction_set(isa: str, name: str) -> None:
    (case,) = (case for case in gated_delta.grid() if case.name == name)
    ours, wanted = case.make(inputs()), case.make(inputs())
    got = on(isa, lambda: gated_delta.implementations["cpu"].run(*ours))
    assert_close(gated_delta, got, gated_delta.reference(*wanted))
    for left, right in zip(tensors(ours), tensors(wanted), strict=True):
        assert_close(gated_delta, left.nan_to_num(), right.nan_to_num())


def test_engines_use_a_set_that_computes_prompts_like_answers() -> None:
    """By their kernels: a token multiplied as one of a prompt's and as one of an answer's is the same bits."""
    weight = packed("cpu", RawLinearWeight((random_weight(inputs(), "Q4_1", (64, 256)),)), torch.float32)
    x_TI = inputs(seed=1).normal(70, 256)

    def products(num_exact: int) -> Any:
        return linear.implementations["cpu"].run(x_TI, weight, None, num_exact)

    assert torch.equal(on(cpu.exact_set(), lambda: products(0)), on(cpu.exact_set(), lambda: products(70)))
    for isa in set(NAMES) & set(cpu.BF16_SETS):
        assert not torch.equal(on(isa, lambda: products(0)), on(isa, lambda: products(70)))
