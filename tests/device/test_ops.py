"""Every op's Triton kernels on the GPU against its reference, over whole grids and at the sizes of real models."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import troth.ops
from tests.cpu.op_cases import assert_close, assert_same_cache
from troth.ops import registry
from troth.ops.attention import attention, paged_kv
from troth.ops.copy_blocks import copy_blocks
from troth.ops.grid import Case, Inputs, RowSpec, rows_of
from troth.ops.impl import triton as kernels
from troth.ops.linear import RawLinearWeight, linear, pack, random_weight
from troth.ops.registry import OPS, Op
from troth.ops.rotary_kv_write import rotary_kv_write
from troth.ops.sample import draws_of, sample, step_key

REASON = kernels.unavailable()
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(REASON is not None or kernels.INTERPRETED, reason=f"the Triton kernels cannot run: {REASON}"),
]
GPU, CPU = torch.device("cuda"), torch.device("cpu")
DTYPES = {"triton": (torch.float32, torch.bfloat16, torch.float16), "invariant": (torch.bfloat16,)}
"""By provider; kernels of exact products take ten seconds to compile each."""
FLOAT32_ONLY = ("sample", "all_finite", "penalise", "mask")
"""Ops on logits."""
EXACT_ON_CPU = ("sample",)
"""Ops whose reference is compared on the CPU: a logarithm of the GPU's own would move near ties."""

for module in pkgutil.iter_modules(troth.ops.__path__):
    importlib.import_module(f"troth.ops.{module.name}")
if REASON is None and not kernels.INTERPRETED:
    registry.activate(("invariant", *registry.default_order()))  # registers them
    registry.activate()


def calls() -> Iterator[Any]:
    for op, provider in product(OPS.values(), ("triton", "invariant")):
        if provider not in op.implementations:
            continue
        for dtype in (torch.float32,) if op.name in FLOAT32_ONLY else DTYPES[provider]:
            for case in op.grid():
                if not case.timed:
                    name = f"{provider}-{op.name}-{case.name}-{str(dtype)[6:]}"
                    yield pytest.param(op, provider, case, dtype, id=name)


def prepared(arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """With weights in the form a model on the GPU has them in."""
    return tuple(pack(a.parts, dtype, GPU) if isinstance(a, RawLinearWeight) else a for a in arguments)


def results(op: Op[Any, Any], returned: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    """What an op returns, or what it writes in place."""
    if returned is None:
        return [] if op is copy_blocks else [arguments[0]]  # blocks are looked at as a whole cache
    return list(returned) if isinstance(returned, tuple) else [returned]


@pytest.mark.parametrize(("op", "provider", "case", "dtype"), list(calls()))
def test_kernels_equal_the_reference_over_the_grid(
    op: Op[Any, Any], provider: str, case: Case, dtype: torch.dtype
) -> None:
    mine = prepared(case.make(Inputs(dtype, GPU)), dtype)
    implementation = op.implementations[provider]
    if not implementation.supports(*mine):
        pytest.skip(f"{op.name}: {provider} does not take these arguments")
    got = results(op, implementation.run(*mine), mine)
    theirs = case.make(Inputs(dtype, CPU if op.name in EXACT_ON_CPU else GPU))
    for ours, want in zip(got, results(op, op.reference(*theirs), theirs), strict=True):
        assert_close(op, ours.to(want.device), want)
    if op in (rotary_kv_write, copy_blocks):
        assert_same_cache(op, mine[-1], theirs[-1])


LONG: list[list[RowSpec]] = [
    [(0, 5000, 1)],
    [(r, 37 * r * r, 1) for r in range(33)],
    [(0, 3000, 5), (1, 0, 2), (2, 140, 8), (3, 4100, 1)][::-1],
    [(0, 800, 1), (1, 0, 1500), (2, 900, 700), (3, 0, 40)],
]


@pytest.mark.parametrize("specs", LONG, ids=["one-long", "many", "few-new", "chunks"])
@pytest.mark.parametrize(("heads", "window", "softcap"), [((32, 8, 128), None, None), ((8, 4, 256), 600, 30.0)])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_attention_of_long_contexts_equals_the_reference(
    specs: list[RowSpec],
    heads: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
    kv_dtype: torch.dtype | None,
) -> None:
    inputs = Inputs(torch.bfloat16, GPU)
    rows = rows_of(specs, GPU)
    kv, table_RB, slots_T = paged_kv(inputs, rows, heads[1], heads[2], window, kv_dtype)
    arguments = inputs.normal(len(slots_T), heads[0], heads[2]), kv, table_RB, rows, heads[2] ** -0.5, window, softcap
    assert_close(attention, attention.implementations["triton"].run(*arguments), attention.reference(*arguments))


def test_rows_that_pad_a_captured_step_are_harmless() -> None:
    """Context 0 gives zeros, and a negative slot is not written."""
    inputs = Inputs(torch.bfloat16, GPU)
    rows = rows_of([(0, 40, 1), (1, 0, 1)], GPU)
    kv, table_RB, slots_T = paged_kv(inputs, rows, 2, 64)
    table_RB[1], slots_T[1] = -1, -1
    rows.context_len_R[1] = 0
    assert (attention(inputs.normal(2, 4, 64), kv, table_RB, rows, 0.1)[1] == 0).all()
    before = kv.v_NKSD.nan_to_num().clone()
    rotary = rotary_of(inputs)
    rotary_kv_write(inputs.normal(2, 8 * 64), 4, torch.tensor([40, 0], device=GPU), rotary, None, slots_T, kv)
    changed = (kv.v_NKSD.nan_to_num() != before).any(dim=-1).any(dim=1).nonzero()
    assert changed.tolist() == [[int(slots_T[0]) // 16, int(slots_T[0]) % 16]]


def rotary_of(inputs: Inputs) -> Any:
    case = next(case for case in rotary_kv_write.grid() if case.name.startswith("4x2x64"))
    rotary = case.make(inputs)[3]
    return type(rotary)(rotary.cos_PW.repeat(9, 1), rotary.sin_PW.repeat(9, 1))


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.2},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 1e-30},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_sample_draws_what_the_reference_draws_over_a_real_vocabulary(filters: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(3)
    for spread in (0.5, 2.5):
        logits_RV = spread * torch.randn(24, 151936, generator=generator)
        keys = [step_key(7, i) for i in range(24)]
        want = sample.reference(logits_RV, draws_of([filters] * 24, keys, CPU))
        got = sample.implementations["triton"].run(logits_RV.to(GPU), draws_of([filters] * 24, keys, GPU))
        assert got.tolist() == want.tolist()


def test_a_decode_step_of_kernels_replays_from_a_graph() -> None:
    """Captured once, replayed on other lengths: what is launched depends on shapes alone."""
    specs: list[RowSpec] = [(0, 700, 1), (1, 20, 1)]
    inputs = Inputs(torch.bfloat16, GPU)
    rows = rows_of(specs, GPU)
    kv, table_RB, _ = paged_kv(inputs, rows, 8, 128)
    q_THD = inputs.normal(2, 32, 128)
    attention(q_THD, kv, table_RB, rows, 0.09)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THD = attention(q_THD, kv, table_RB, rows, 0.09)
    shorter: list[RowSpec] = [(0, 130, 1), (1, 3, 1)]
    rows.context_len_R.copy_(rows_of(shorter, GPU).context_len_R)
    q_THD.copy_(inputs.normal(2, 32, 128))
    graph.replay()
    assert_close(attention, out_THD, attention.reference(q_THD, kv, table_RB, rows_of(shorter, GPU), 0.09))


@pytest.mark.parametrize("form", ["BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_linear_of_few_tokens_does_not_depend_on_their_number(form: str) -> None:
    """Bit for bit as far as the kernel goes; one token of numbers is summed in another order, in its own kernel."""
    inputs = Inputs(torch.bfloat16, GPU)
    weight = pack([random_weight(inputs, form, (100, 4096))], torch.bfloat16, GPU)
    most = 32 if form == "BF16" else 16
    x_TI = inputs.normal(most, 4096)
    every = linear(x_TI, weight)
    for count in (2, 5, most // 2 + 1) if form == "BF16" else (1, 2, 5, most // 2 + 1):
        assert torch.equal(linear(x_TI[:count], weight), every[:count])
    assert_close(linear, linear(x_TI[:1], weight), every[:1])


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("shape", [(1500, 4096), (200, 1440)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_of_quantised_weights_equals_the_reference_in_every_tiling(
    form: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Inputs split and whole, and such as end within a block; twice, for what a product leaves behind."""
    inputs = Inputs(dtype, GPU)
    raw = RawLinearWeight((random_weight(inputs, form, shape),))
    weight, bias_O = pack(raw.parts, dtype, GPU), inputs.normal(shape[0])
    for num_tokens in (1, 8, 13, 32, 33, 64, 65, 3):
        x_TI = inputs.normal(num_tokens, shape[1])
        assert_close(linear, linear(x_TI, weight, bias_O), linear.reference(x_TI, raw, bias_O))
