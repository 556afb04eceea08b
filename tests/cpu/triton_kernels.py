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

from tests.cpu.op_cases import CPU, FLOATS, assert_close, inputs, packed, run, step
from troth.ops.all_finite import all_finite
from troth.ops.attention import attention, paged_kv
from troth.ops.embedding import embedding
from troth.ops.gated_activation import gated_activation
from troth.ops.gated_rms_norm import gated_rms_norm
from troth.ops.grid import RowSpec
from troth.ops.impl import triton as kernels
from troth.ops.impl import triton_attention_split, triton_sample, triton_sample_filter
from troth.ops.impl.triton_attention_whole import gather
from troth.ops.linear import RawLinearWeight, linear, random_weight
from troth.ops.registry import Op
from troth.ops.rms_norm import add_rms_norm, rms_norm
from troth.ops.rotary_kv_write import rotary_kv_write
from troth.ops.sample import draws_of, sample, step_key

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")

Handle = interpreter.TensorHandle
_patch, _dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
_convert = interpreter._convert_float


def _patched(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of one element, of which NumPy 2.4 makes no integers."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _widened(x: Any) -> Any:
    return x if x.dtype.scalar != tl.bfloat16 else Handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _multiplied(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """bfloat16 is kept as its bits, which Triton 3.6 multiplies as integers."""
    return _dot(self, _widened(a), _widened(b), *rest)


def _converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Triton 3.6 cuts off where a GPU rounds."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return _convert(data, source, target, rounding)
    rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).bfloat16()
    return rounded.view(torch.uint16).numpy().reshape(data.shape)


interpreter._patch_lang_tensor, interpreter._convert_float = _patched, _converted
interpreter.InterpreterBuilder.create_dot = _multiplied


def compare(op: Op[Any, Any], case_name: str, dtype: torch.dtype) -> None:
    (case,) = [case for case in op.grid() if case.name == case_name]
    args = case.make(inputs(dtype))
    mine = tuple(_packed(a, dtype) if isinstance(a, RawLinearWeight) else a for a in args)
    theirs = case.make(inputs(dtype))
    got, want = run(op, "triton", *mine), op.reference(*theirs)
    for ours, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        assert_close(op, ours, expected)
    if op is rotary_kv_write:
        for ours, expected in ((mine[-1].k_NKDS, theirs[-1].k_NKDS), (mine[-1].v_NKSD, theirs[-1].v_NKSD)):
            assert_close(op, ours.nan_to_num(), expected.nan_to_num())


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
        (gated_activation, "silu-7x96"),
        (gated_activation, "gelu_tanh-3x1536"),
        (rotary_kv_write, "1x1x32-0.5-norms-strided"),
        (embedding, "BF16-scale-2.5"),
        (embedding, "Q8_0-scale-1"),
        (embedding, "Q4_1-scale-2.5"),
        (linear, "BF16-33x96-2-bias"),
        (linear, "Q4_0-33x96-17"),
        (linear, "Q8_0-33x96-2-bias"),
        (linear, "Q4_1-3x64-1"),
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
def test_triton_attention_does_not_depend_on_how_many_programs_share_a_row(
    specs: list[RowSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: eleven splits in two groups, by one program and by many."""
    rows = step(specs)
    kv, table_RB, slots_T = paged_kv(inputs(), rows, 1, 32)
    args = (inputs(seed=1).normal(len(slots_T), 2, 32), kv, table_RB, rows, 0.2)
    monkeypatch.setattr(triton_attention_split, "SPLIT_TOKENS", 64)
    many = run(attention, "triton", *args)
    monkeypatch.setattr(triton_attention_split, "PROGRAMS", 1)
    one = run(attention, "triton", *args)
    assert torch.equal(one, many)
    assert_close(attention, one, attention.reference(*args))


def test_triton_attention_of_an_empty_row_is_zero_and_follows_no_block() -> None:
    rows = step([(0, 20, 1), (1, 0, 1)])
    kv, table_RB, _ = paged_kv(inputs(), rows, 1, 32)
    table_RB[1], rows.context_len_R[1] = -1, 0
    out_THD = run(attention, "triton", inputs(seed=1).normal(2, 2, 32), kv, table_RB, rows, 0.2)
    assert (out_THD[1] == 0).all()
    assert out_THD[0].isfinite().all()


def test_triton_rotary_does_not_write_negative_slots() -> None:
    (case,) = [case for case in rotary_kv_write.grid() if case.name == "1x1x32-1"]
    args = case.make(inputs())
    before = args[-1].v_NKSD.nan_to_num().clone()
    args[-2].fill_(-1)
    run(rotary_kv_write, "triton", *args)
    assert torch.equal(args[-1].v_NKSD.nan_to_num(), before)


def test_gather_puts_a_row_in_order() -> None:
    kv, table_RB, _ = paged_kv(inputs(), step([(0, 0, 37)]), 2, 24)
    k_LKD, v_LKD = gather(kv, table_RB[0], 37, torch.float32)
    for got, cache in ((k_LKD, kv.k_NKDS.transpose(2, 3)), (v_LKD, kv.v_NKSD)):
        assert torch.equal(got, cache[table_RB[0]].transpose(1, 2).flatten(0, 1)[:37])


@pytest.mark.parametrize("form", ["BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_triton_linear_of_whole_tiles_equals_the_reference(form: str, num_tokens: int) -> None:
    """Widths that the kernels of one token and of a few take."""
    raw = RawLinearWeight((random_weight(inputs(), form, (5, 4096)),))
    x_TI, bias_O = inputs(torch.bfloat16, 1).normal(num_tokens, 4096), inputs(torch.bfloat16, 2).normal(5)
    got = run(linear, "triton", x_TI, _packed(raw, torch.bfloat16), bias_O)
    assert_close(linear, got, linear.reference(x_TI, raw, bias_O))


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
    (provider,) = [p for p in importlib.import_module("troth.ops.registry").PROVIDERS if p.name == "triton"]
    for module in provider.modules:
        assert importlib.import_module(f"troth.ops.impl.{module}")
