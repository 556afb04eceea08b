"""The Triton kernels against their references, by Triton's interpreter on the CPU; run by ``test_op_triton.py``.

A process of its own, with TRITON_INTERPRET=1 from its start: elsewhere these kernels must not take CPU tensors. The
interpreter takes milliseconds per program, so cases are few and small; whole grids run on a GPU (``tests/device``).
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.cpu.op_cases import CPU, FLOATS, assert_close, assert_same_cache, inputs, packed, run, step, tensors
from tests.cpu.test_op_gated_delta import check_drafts as check_delta_drafts
from tests.cpu.test_op_short_conv import check_drafts as check_conv_drafts
from troth.ops.all_finite import all_finite
from troth.ops.attention import attention, paged_kv
from troth.ops.codes import FP8, as_bytes, to_codes
from troth.ops.copy_blocks import copy_blocks
from troth.ops.embedding import embedding
from troth.ops.gated_activation import gated_activation
from troth.ops.gated_delta import arguments as gated_delta_arguments
from troth.ops.gated_delta import gated_delta
from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.grid import RowSpec
from troth.ops.impl import triton as kernels
from troth.ops.impl import triton_attention_ordered, triton_attention_split, triton_sample, triton_sample_filter
from troth.ops.impl.triton_attention_whole import attend_whole, gather
from troth.ops.impl.triton_fp8 import rounded
from troth.ops.linear import RawLinearWeight, linear, random_weight
from troth.ops.registry import Op
from troth.ops.rms_norm import add_rms_norm, rms_norm
from troth.ops.rotary_kv_write import rotary_kv_write
from troth.ops.sample import draws_of, sample, step_key
from troth.ops.short_conv import short_conv
from troth.ops.sigmoid_gate import sigmoid_gate

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")
importlib.import_module("troth.ops.impl.triton_invariant")  # not active by default

Handle = interpreter.TensorHandle
_patch, _dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
_convert = interpreter._convert_float
_TORCH: dict[Any, tuple[torch.dtype, Any]] = {
    tl.float32: (torch.float32, np.uint32),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
}
"""Kinds of numbers whose conversions PyTorch does for the interpreter, with the integers that hold their bits."""


def _patched(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element, of which NumPy 2.4 makes no integers."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _widened(x: Any) -> Any:
    if x.dtype.scalar == tl.float8e4nv:
        return Handle(_converted(x.data, tl.float8e4nv, tl.float32, None).view(np.float32), tl.float32)
    return x if x.dtype.scalar != tl.bfloat16 else Handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _multiplied(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """bfloat16 and fp8 are kept as their bits, which Triton 3.6 multiplies as integers."""
    return _dot(self, _widened(a), _widened(b), *rest)


def _converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Triton 3.6 cuts off where a GPU rounds, and loses the last bits of small fp8 numbers."""
    kinds = _TORCH.get(source), _TORCH.get(target)
    if None in kinds or tl.float32 not in (source, target):
        return _convert(data, source, target, rounding)
    (given, _), (wanted, bits) = kinds
    numbers = torch.from_numpy(np.ascontiguousarray(data).view(_TORCH[source][1])).view(given)
    return numbers.to(wanted).view(torch.uint8).numpy().view(bits).reshape(data.shape)


def _counted(self: Any, x: Any, target: Any) -> Any:
    """Whole numbers as bfloat16, which Triton 3.6 takes for its bits."""
    number = Handle(x.data.astype(np.float32), tl.float32)
    return self.cast_impl(number, target)


interpreter._patch_lang_tensor, interpreter._convert_float = _patched, _converted
interpreter.InterpreterBuilder.create_si_to_fp = _counted
interpreter.InterpreterBuilder.create_dot = _multiplied


def compare(op: Op[Any, Any], case_name: str, dtype: torch.dtype, provider: str = "triton") -> None:
    (case,) = [case for case in op.grid() if case.name == case_name]
    args = case.make(inputs(dtype))
    mine = tuple(_packed(a, dtype) if isinstance(a, RawLinearWeight) else a for a in args)
    theirs = case.make(inputs(dtype))
    got, want = run(op, provider, *mine), op.reference(*theirs)
    for ours, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        assert_close(op, ours, expected)
    if op in (short_conv, gated_delta):
        for ours, expected in zip(tensors(mine), tensors(theirs), strict=True):
            assert torch.equal(ours.isnan(), expected.isnan()), "states or trails of other rows were touched"
            assert_close(op, ours.nan_to_num(), expected.nan_to_num())
    if op is rotary_kv_write:
        assert_same_cache(op, mine[-1], theirs[-1])


@pytest.mark.parametrize(
    ("op", "case", "dtype"),
    [
        (short_conv, "mixed-4x33", torch.float32),
        (short_conv, "shorter-than-the-taps-3x33", torch.bfloat16),
        (short_conv, "recall-and-verify-4x33", torch.bfloat16),
        (short_conv, "recalls-2x33", torch.float32),
        (short_conv, "mixed-3x33-plain", torch.bfloat16),
        (short_conv, "recall-and-verify-3x33-plain", torch.float32),
        (gated_delta, "mixed-1x1x32x32", torch.float32),
        (gated_delta, "continued-prompt-1x1x32x32", torch.bfloat16),
        (gated_delta, "neighbours-2x4x16x24", torch.bfloat16),
        (gated_delta, "verifies-1x1x32x32", torch.float32),
        (gated_delta, "recalls-1x1x32x32", torch.bfloat16),
        (gated_delta, "recall-and-verify-2x4x16x24", torch.float32),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else str(value),
)
def test_triton_recurrences_equal_the_reference(op: Op[Any, Any], case: str, dtype: torch.dtype) -> None:
    compare(op, case, dtype)


def test_triton_recurrences_leave_padding_alone() -> None:
    """A row without context: its place is past the end, and it has no state."""
    args = gated_delta_arguments([(0, 5, 1), (1, 5, 1)], (1, 1, 16, 8), inputs())
    rows, states, trails = args[-1], args[-3], args[-2]
    rows.row_R[1], rows.context_len_R[1] = len(states), 0
    before = states[1:].clone()
    assert (run(gated_delta, "triton", *args)[1] == 0).all()
    convolved = torch.randn(2, 24), torch.randn(3, 24), torch.randn(len(states), 2, 24), torch.randn(len(states), 8, 24)
    remembered = convolved[2][1:].clone()
    assert run(short_conv, "triton", *convolved, rows).isfinite().all()
    assert torch.equal(states[1:].nan_to_num(), before.nan_to_num())
    assert trails.isnan().all()
    assert torch.equal(convolved[2][1:], remembered)


@pytest.mark.parametrize("num_right", [0, 3])
def test_triton_computes_drafts_as_single_tokens_bit_by_bit(num_right: int) -> None:
    check_delta_drafts("triton", num_right)
    check_conv_drafts("triton", num_right)


def _packed(raw: RawLinearWeight, dtype: torch.dtype) -> Any:
    quantised = not isinstance(raw.parts[0], torch.Tensor)
    return packed("triton" if quantised else "torch", raw, dtype)


def test_kernels_run_in_the_interpreter_here() -> None:
    assert kernels.INTERPRETED
    assert kernels.unavailable() is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("op", "case"),
    [
        (rms_norm, "3x65"),
        (rms_norm, "1x1"),
        (add_rms_norm, "5x576"),
        (gated_rms_norm, "3x5x24"),
        (sigmoid_gate, "7x96"),
        (gated_activation, "silu-7x96"),
        (gated_activation, "gelu_tanh-3x1536"),
        (rotary_kv_write, "1x1x32-0.5-norms-strided"),
        (rotary_kv_write, "1x1x32-1-int8"),
        (rotary_kv_write, "1x1x32-1-fp8"),
        (embedding, "BF16-scale-2.5"),
        (embedding, "Q8_0-scale-1"),
        (embedding, "Q4_1-scale-2.5"),
        (linear, "BF16-33x96-2-bias"),
        (linear, "Q4_0-33x96-17"),
        (linear, "Q8_0-33x96-2-bias"),
        (linear, "Q4_1-3x64-1"),
        (linear, "FP8-5x24-1"),
        (linear, "FP8-33x96-2-bias"),
        (linear, "FP8-144x576-35"),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else value,
)
def test_triton_equals_the_reference(op: Op[Any, Any], case: str, dtype: torch.dtype) -> None:
    compare(op, case, dtype)


@pytest.mark.parametrize(
    "case",
    [
        "one-single-9x3x80-window-17",
        "uneven-singles-4x2x64-window-None",
        "prompt-8x1x128-window-7",
        "continued-prompt-1x1x32-window-None",
        "mixed-4x2x64-window-16",
        "mixed-1x1x32-window-17-int8",
        "one-single-9x3x80-window-None-fp8",
        "uneven-singles-1x1x32-window-17-fp8",
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_triton_attention_equals_the_reference(case: str, dtype: torch.dtype) -> None:
    compare(attention, case, dtype)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("specs", [[(0, 300, 1), (1, 700, 1)], [(0, 290, 3), (1, 0, 2)]], ids=["decode", "verify"])
def test_triton_attention_merges_splits(specs: list[RowSpec], softcap: float | None) -> None:
    rows = step(specs)
    kv, table_RB, slots_T = paged_kv(inputs(), rows, 1, 32)
    args = (inputs(seed=1).normal(len(slots_T), 2, 32), kv, table_RB, rows, 0.2, None, softcap)
    assert_close(attention, run(attention, "triton", *args), attention.reference(*args))


@pytest.mark.parametrize("specs", [[(0, 300, 1), (1, 700, 1), (2, 20, 1)], [(0, 590, 3), (1, 0, 2)]])
@pytest.mark.parametrize("programs", [1, 3])
def test_triton_attention_splits_rows_among_any_number_of_programs(
    specs: list[RowSpec], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = step(specs)
    kv, table_RB, slots_T = paged_kv(inputs(), rows, 1, 32)
    args = (inputs(seed=1).normal(len(slots_T), 2, 32), kv, table_RB, rows, 0.2)
    monkeypatch.setattr(triton_attention_split, "PROGRAMS", programs)
    monkeypatch.setattr(triton_attention_split, "FEW", triton_attention_split.MANY)
    assert_close(attention, run(attention, "triton", *args), attention.reference(*args))


@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8], ids=str)
def test_triton_attention_reads_codes_for_drafts_and_chunks(kv_dtype: torch.dtype) -> None:
    """A few new tokens in splits, with a softcap; beside a prompt, whose rows become numbers first."""
    for specs in ([(0, 290, 3), (1, 0, 2)], [(2, 300, 1), (0, 20, 3), (1, 0, 18)]):
        rows = step(specs)
        kv, table_RB, slots_T = paged_kv(inputs(torch.bfloat16), rows, 1, 32, None, kv_dtype)
        args = (inputs(torch.bfloat16, 1).normal(len(slots_T), 2, 32), kv, table_RB, rows, 0.2, None, 2.0)
        assert_close(attention, run(attention, "triton", *args), attention.reference(*args))


def test_triton_attention_of_an_empty_row_is_zero_and_follows_no_block() -> None:
    rows = step([(0, 20, 1), (1, 0, 1)])
    kv, table_RB, _ = paged_kv(inputs(), rows, 1, 32)
    table_RB[1], rows.context_len_R[1] = -1, 0
    out_THD = run(attention, "triton", inputs(seed=1).normal(2, 2, 32), kv, table_RB, rows, 0.2)
    assert (out_THD[1] == 0).all()
    assert out_THD[0].isfinite().all()


@pytest.mark.parametrize("case", [case.name for case in copy_blocks.grid() if not case.timed])
def test_triton_copies_blocks_as_the_reference_does(case: str) -> None:
    (made,) = [one for one in copy_blocks.grid() if one.name == case]
    mine, theirs = made.make(inputs(torch.bfloat16)), made.make(inputs(torch.bfloat16))
    run(copy_blocks, "triton", *mine)
    copy_blocks.reference(*theirs)
    for got, want in zip(tensors((mine[-1],)), tensors((theirs[-1],)), strict=True):
        assert torch.equal(as_bytes(got).clone().view(torch.uint8), as_bytes(want).clone().view(torch.uint8))


def test_triton_rotary_does_not_write_negative_slots() -> None:
    (case,) = [case for case in rotary_kv_write.grid() if case.name == "1x1x32-1"]
    args = case.make(inputs())
    before = args[-1].v_NKSD.nan_to_num().clone()
    args[-2].fill_(-1)
    run(rotary_kv_write, "triton", *args)
    assert torch.equal(args[-1].v_NKSD.nan_to_num(), before)


@pytest.mark.parametrize("dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_gather_puts_a_row_in_order(dtype: torch.dtype | None) -> None:
    kv, table_RB, _ = paged_kv(inputs(), step([(0, 0, 37)]), 2, 24, dtype=dtype)
    k_LKD, v_LKD = gather(kv, table_RB[0], 37, 64, torch.float32)
    for got, held in ((k_LKD, kv.keys(table_RB[0]).transpose(2, 3)), (v_LKD, kv.values(table_RB[0]))):
        assert torch.equal(got[:37], held.transpose(1, 2).flatten(0, 1)[:37])
        assert (got[37:] == 0).all()


def test_triton_attention_of_a_whole_prompt_does_not_see_how_its_length_is_rounded() -> None:
    """By PyTorch's own kernel on the CPU, between the same tensors as on a GPU."""
    rows = step([(0, 0, 41)])
    kv, table_RB, _ = paged_kv(inputs(), rows, 2, 32)
    q_THD = inputs(seed=1).normal(41, 4, 32)
    got_THD = attend_whole(q_THD, kv, table_RB[0], 0.2)
    assert_close(attention, got_THD.contiguous(), attention.reference(q_THD, kv, table_RB, rows, 0.2))


INVARIANT: list[tuple[Op[Any, Any], str]] = [
    (linear, "BF16-33x96-1"),
    (linear, "BF16-130x576-17"),
    (linear, "Q8_0-33x96-2-bias"),
    (rotary_kv_write, "1x1x32-0.5-norms-strided"),
    (attention, "one-single-9x3x80-window-17"),
    (attention, "uneven-singles-4x2x64-window-None"),
    (attention, "continued-prompt-1x1x32-window-None"),
    (attention, "mixed-4x2x64-window-16"),
]


@pytest.mark.parametrize(("op", "case"), INVARIANT, ids=lambda value: value.name if isinstance(value, Op) else value)
def test_invariant_equals_the_reference(op: Op[Any, Any], case: str) -> None:
    compare(op, case, torch.bfloat16, "invariant")


@pytest.fixture
def matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products summed over the inputs in order, as a matrix unit does; NumPy's order depends on shapes."""

    def in_order(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        left, right, total = _widened(a).data, _widened(b).data, acc.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[k]
        return Handle(total, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", in_order)


@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize("window", [None, 50])
def test_invariant_attention_of_a_token_is_the_same_bits_in_every_step(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, beside others, by any number of programs, and as part of chunks that begin anywhere."""
    monkeypatch.setattr(triton_attention_ordered, "SPLIT", 64)
    whole, length = step([(0, 0, 150)]), 150
    kv, table_RB, _ = paged_kv(inputs(), whole, 1, 32)
    q_THD = inputs(seed=1).normal(length, 2, 32)
    want_THD = run(attention, "invariant", q_THD, kv, table_RB, whole, 0.2, window)
    for begin in (90, 143):
        chunk = step([(0, begin, length - begin)])
        got = run(attention, "invariant", q_THD[begin:], kv, table_RB, chunk, 0.2, window)
        assert torch.equal(got, want_THD[begin:])
    for programs in (1, 512):
        monkeypatch.setattr(triton_attention_ordered, "PROGRAMS", programs)
        singles = step([(0, 149, 1), (1, 20, 1), (2, 100, 1)])
        together = run(attention, "invariant", q_THD[[149, 20, 100]], kv, table_RB.expand(3, -1), singles, 0.2, window)
        assert torch.equal(together, want_THD[[149, 20, 100]])


@pytest.mark.usefixtures("matrix_unit")
def test_invariant_product_of_a_token_is_the_same_bits_among_any_number() -> None:
    weight = _packed(RawLinearWeight((random_weight(inputs(), "BF16", (70, 256)),)), torch.bfloat16)
    x_TI = inputs(torch.bfloat16, 1).normal(129, 256)
    every = run(linear, "invariant", x_TI, weight)
    for count in (1, 20, 50):
        assert torch.equal(run(linear, "invariant", x_TI[:count], weight), every[:count])


@pytest.mark.parametrize("form", ["BF16", "FP8", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_triton_linear_of_whole_tiles_equals_the_reference(form: str, num_tokens: int) -> None:
    """Widths that the kernels of one token and of a few take."""
    raw = RawLinearWeight((random_weight(inputs(), form, (5, 4096)),))
    x_TI, bias_O = inputs(torch.bfloat16, 1).normal(num_tokens, 4096), inputs(torch.bfloat16, 2).normal(5)
    got = run(linear, "triton", x_TI, _packed(raw, torch.bfloat16), bias_O)
    assert_close(linear, got, linear.reference(x_TI, raw, bias_O))


def test_triton_rounds_a_token_as_the_reference_bit_by_bit() -> None:
    """Ordinary rows, one of zeros, tiny ones, and such as are not finite."""
    x_TI = inputs().normal(7, 96) * torch.tensor([1.0, 1e-3, 3e4, 0.0, 1e-39, 1.0, 1.0])[:, None]
    x_TI[5, 3], x_TI[6, 90] = math.nan, -math.inf
    codes_TI, scale_T = rounded(x_TI)
    want_TI, want_T = to_codes(x_TI, FP8)
    assert torch.equal(codes_TI.view(torch.uint8), want_TI.view(torch.uint8))
    assert torch.equal(scale_T[:5], want_T[:5])
    assert not scale_T[5:].isfinite().any()


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.2},
    {"top_k": 20, "top_p": 0.7},
    {"top_p": 0.5},
    {"min_p": 0.3},
    {"top_k": 90, "min_p": 0.02, "temperature": 1.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
]


def test_triton_sample_draws_what_the_reference_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat and peaked, tied and masked logits; runs and tiles shorter than the vocabulary."""
    monkeypatch.setattr(triton_sample, "RUN", 128)
    monkeypatch.setattr(triton_sample_filter, "TILE", 256)
    torch.manual_seed(1)
    spread_R1 = torch.tensor([0.1, 1.0, 6.0]).repeat(len(FILTERS))[: len(FILTERS), None]
    logits_RV = (spread_R1 * torch.randn(len(FILTERS), 300)).round(decimals=1)
    logits_RV[:, ::7] = -math.inf
    draws = draws_of(FILTERS, [step_key(3, i) for i in range(len(FILTERS))], CPU)
    assert torch.equal(run(sample, "triton", logits_RV, draws), sample.reference(logits_RV.clone(), draws))


def test_triton_all_finite_finds_every_kind_of_bad_logit() -> None:
    (case,) = [case for case in all_finite.grid() if case.name == "8x1031"]
    (logits_RV,) = case.make(inputs())
    assert run(all_finite, "triton", logits_RV).tolist() == all_finite.reference(logits_RV).tolist()


def test_provider_modules_register_what_the_registry_lists() -> None:
    providers = importlib.import_module("troth.ops.registry").PROVIDERS
    for module in [m for provider in providers if provider.name in ("triton", "invariant") for m in provider.modules]:
        assert importlib.import_module(f"troth.ops.impl.{module}")
