"""Operations that a recording makes part of their neighbours: fewer of them, and not a bit of any result is another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.test_weights_quantized import quant_tensor
from troth.artifact.ggml_types import GgmlType
from troth.ops.attention import attention, paged_kv
from troth.ops.gated_activation import gated_activation
from troth.ops.grid import Inputs, rows_of
from troth.ops.impl import cpu
from troth.ops.linear import linear, pack
from troth.ops.rms_norm import add_rms_norm, rms_norm
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write

pytestmark = pytest.mark.skipif(bool(cpu.unavailable()), reason="the kernels are not built")

CPU = torch.device("cpu")
WIDTH, INNER = 256, 512
HEADS = (8, 2, 32)
"""Query heads, key-value heads, head size."""
CONTEXTS = (700, 3, 256, 40, 1)
Chain = Callable[[], Sequence[Tensor]]


def weight(kind: str, outputs: int, inputs: int) -> Any:
    if kind == "q4_0":
        return pack([quant_tensor(GgmlType.Q4_0, outputs, inputs)], torch.float32, CPU)
    torch.manual_seed(outputs + inputs)
    return pack([torch.randn(outputs, inputs) / inputs**0.5], torch.float32, CPU)


class Layer:
    """What a layer of a model does in a step of single tokens, over buffers that can be filled anew."""

    def __init__(
        self,
        num_rows: int,
        kind: str,
        kv_dtype: torch.dtype,
        heads: tuple[int, int, int] = HEADS,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        torch.manual_seed(7)
        self.num_heads, num_kv_heads, head_dim = heads
        self.head_dim, self.window, self.softcap = head_dim, window, softcap
        specs = [(row, context - 1, 1) for row, context in enumerate(CONTEXTS[:num_rows])]
        self.rows = rows_of(specs, CPU)
        self.kv, self.table_RB, self.slots_T = paged_kv(
            Inputs(torch.float32, CPU, 1), self.rows, num_kv_heads, head_dim, dtype=kv_dtype
        )
        self.positions_T = torch.tensor([start for _, start, _ in specs])
        angle_PW = torch.arange(max(CONTEXTS))[:, None] * 0.5 ** torch.arange(head_dim // 2)
        self.rotary = RotaryTable(angle_PW.cos(), angle_PW.sin())
        self.norms = HeadNorms(torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5, 1e-6)
        self.qkv = weight(kind, (self.num_heads + 2 * num_kv_heads) * head_dim, WIDTH)
        self.out = weight(kind, WIDTH, self.num_heads * head_dim)
        self.gate_up, self.down = weight(kind, 2 * INNER, WIDTH), weight(kind, WIDTH, INNER)
        self.bias_O = torch.randn(WIDTH)
        self.scale_D = torch.rand(WIDTH) + 0.5
        self.x_TD, self.residual_TD = torch.empty(num_rows, WIDTH), torch.empty(num_rows, WIDTH)
        self.num_rows = num_rows

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x_TD.normal_(generator=generator)
        self.residual_TD.normal_(generator=generator)

    def whole(self) -> Sequence[Tensor]:
        normed_TD = rms_norm(self.x_TD, self.scale_D, 1e-6)
        qkv_TE = linear(normed_TD, self.qkv, None, self.num_rows)
        q_THD = rotary_kv_write(
            qkv_TE, self.num_heads, self.positions_T, self.rotary, self.norms, self.slots_T, self.kv
        )
        seen_THD = attention(q_THD, self.kv, self.table_RB, self.rows, self.head_dim**-0.5, self.window, self.softcap)
        out_TD = linear(seen_THD.view(self.num_rows, -1), self.out, self.bias_O, self.num_rows)
        normed_TD, residual_TD = add_rms_norm(out_TD, self.residual_TD, self.scale_D, 1e-6)
        gate_up_TI = linear(normed_TD, self.gate_up, None, self.num_rows)
        active_TI = gated_activation(gate_up_TI, "silu")
        down_TD = linear(active_TI, self.down, None, self.num_rows)
        last_TD, residual_TD = add_rms_norm(down_TD, residual_TD, self.scale_D, 1e-6)
        return normed_TD, q_THD, seen_THD, active_TI, out_TD, down_TD, last_TD, residual_TD

    def sum_that_its_own_inputs_come_from(self) -> Sequence[Tensor]:
        normed_TD = rms_norm(self.residual_TD, self.scale_D, 1e-6)
        out_TD = linear(normed_TD, self.out, None, self.num_rows)
        again_TD, residual_TD = add_rms_norm(out_TD, self.residual_TD, self.scale_D, 1e-6)
        return normed_TD, out_TD, again_TD, residual_TD

    def sum_that_it_reads(self) -> Sequence[Tensor]:
        out_TD = linear(self.residual_TD, self.out, None, self.num_rows)
        again_TD, residual_TD = add_rms_norm(out_TD, self.residual_TD, self.scale_D, 1e-6)
        return out_TD, again_TD, residual_TD

    def norm_of_something_else(self) -> Sequence[Tensor]:
        normed_TD = rms_norm(self.x_TD, self.scale_D, 1e-6)
        out_TD = linear(self.residual_TD, self.out, None, self.num_rows)
        return normed_TD, out_TD, linear(normed_TD, self.out, None, self.num_rows)


def check(layer: Layer, chain: Chain, num_operations: int) -> None:
    """Recorded and run again on other numbers, a chain leaves what its operations leave one by one."""
    layer.fill(1)
    with cpu.recording() as tape:
        results = chain()
    assert len(tape) == num_operations
    kept = {name: tensor.clone() for name, tensor in layer.kv.tensors().items()}
    for seed in (2, 3):
        layer.fill(seed)
        expected = [result.clone() for result in chain()]
        cache = {name: tensor.clone() for name, tensor in layer.kv.tensors().items()}
        for name, tensor in layer.kv.tensors().items():
            tensor.copy_(kept[name])
        tape.spoil()
        layer.fill(seed)  # sums are written in place, and were spoilt
        tape.run()
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result, wanted)
        for name, tensor in layer.kv.tensors().items():
            assert torch.equal(tensor.nan_to_num(), cache[name].nan_to_num()), name


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("kind", ["q4_0", "float32"])
@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_a_layer_is_the_same_in_fewer_operations(num_rows: int, kind: str, kv_dtype: torch.dtype, threads: int) -> None:
    cpu.start(threads)
    try:
        layer = Layer(num_rows, kind, kv_dtype)
        # norm with qkv; rotary with attention; merge with out; norm with gate_up; gate with down; the last norm. Of
        # more tokens rotary alone joins another, and operations of their own round the inputs of quantised rows.
        num_rounded = 4 if kind == "q4_0" else 0
        check(layer, layer.whole, 6 if num_rows <= 3 else 10 + num_rounded)
    finally:
        cpu.start(torch.get_num_threads())


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (1, 20.0), (300, 5.0)])
@pytest.mark.parametrize("heads", [(9, 3, 64), (50, 1, 32), (7, 7, 32), (12, 4, 256)], ids=str)
def test_heads_of_any_number_and_windows_are_the_same(
    heads: tuple[int, int, int], window: int | None, softcap: float | None
) -> None:
    layer = Layer(2, "float32", torch.float16, heads, window, softcap)
    check(layer, layer.whole, 6)


@pytest.mark.parametrize(
    ("chain", "num_operations"),
    [
        # The norm becomes part of the product, which then must leave the sum that it reads alone.
        (Layer.sum_that_its_own_inputs_come_from, 2),
        (Layer.sum_that_it_reads, 2),
        (Layer.norm_of_something_else, 3),
    ],
)
def test_what_others_read_or_change_meanwhile_stays_apart(
    chain: Callable[[Layer], Sequence[Tensor]], num_operations: int
) -> None:
    layer = Layer(1, "q4_0", torch.float32)
    check(layer, partial(chain, layer), num_operations)
