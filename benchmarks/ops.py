"""Every op on the sizes of real models: time, and the bytes and products per second beside what the machine can do.

The ceiling of an op that reads much is the speed of memory, of one that multiplies much that of a large float32 matrix
product; each line shows the one that is nearer. Weights and caches take turns among copies, so that none is in a cache
that a real step would have flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import lib
from troth.ops import registry
from troth.ops.attention import LayerKV, attention
from troth.ops.grid import Case, Inputs
from troth.ops.impl import cpu
from troth.ops.linear import RawLinearWeight, linear, pack
from troth.ops.registry import Op
from troth.ops.rows import Rows

TESTS = ("tests/cpu/test_op_linear.py", "tests/cpu/test_op_attention.py", "tests/cpu/test_op_norms.py")
CPU = torch.device("cpu")
COPIES_BYTES = 256 * 2**20
"""Arguments of one case, all copies together: more than any last-level cache here."""
MAX_COPIES = 8
SECONDS = 0.4
"""Of measuring each case."""


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", help="ops whose name contains this")
    arguments = parser.parse_args()
    lib.gate(TESTS, arguments)
    registry.activate()
    torch.set_num_threads(arguments.threads)
    if cpu.unavailable() is None:
        cpu.start(arguments.threads)
    memory, products = lib.memory_gb_per_s(arguments.threads), product_gflop_per_s()
    print(f"{arguments.threads} threads: memory {memory:.1f} GB/s, float32 products {products:.0f} GFLOP/s")
    figures: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for op, case in timed_cases(arguments.only):
            seconds, num_bytes, flops = measure(op, case)
            share = max(num_bytes / seconds / 1e9 / memory, flops / seconds / 1e9 / products)
            figures[f"{op.name} {case.name}"] = {
                "us": seconds * 1e6,
                "gb_per_s": num_bytes / seconds / 1e9,
                "gflop_per_s": flops / seconds / 1e9,
                "share_of_ceiling": share,
            }
            rates = f"{num_bytes / seconds / 1e9:8.1f} GB/s" + (
                f" {flops / seconds / 1e9:8.1f} GFLOP/s" if flops else ""
            )
            print(f"{op.name + ' ' + case.name:52} {seconds * 1e6:10.1f} us {rates:32} {share:5.2f} of the ceiling")
    options = {"threads": arguments.threads, "kernels": cpu.description() if cpu.unavailable() is None else None}
    result = lib.stamp(options) | {"figures": figures, "memory_gb_per_s": memory, "products_gflop_per_s": products}
    lib.finish("ops-cpu", result, arguments)


def timed_cases(only: str | None) -> Iterator[tuple[Op[Any, Any], Case]]:
    """Cases of real sizes of every op, or of those named."""
    for op in registry.OPS.values():
        for case in op.grid():
            if case.timed and (only is None or only in op.name):
                yield op, case


def measure(op: Op[Any, Any], case: Case) -> tuple[float, int, float]:
    """Median seconds of a call, the bytes it must move and the floating-point operations it must do."""
    first = arguments_of(case, 0)
    num_bytes, flops = work(op, first)
    copies = max(1, min(MAX_COPIES, COPIES_BYTES // max(1, num_bytes)))
    turns = [first] + [arguments_of(case, seed) for seed in range(1, copies)]
    for turn in turns:
        op(*turn)
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < 5:
        turn = turns[len(times) % len(turns)]
        times.append(lib.timed(lambda turn=turn: op(*turn)))  # type: ignore[misc]
    return sorted(times)[len(times) // 2], num_bytes, flops


def arguments_of(case: Case, seed: int) -> tuple[Any, ...]:
    """A call's arguments, weights in the form that a model has them in."""
    made = case.make(Inputs(torch.float32, CPU, seed))
    return tuple(pack(a.parts, torch.float32, CPU) if isinstance(a, RawLinearWeight) else a for a in made)


def work(op: Op[Any, Any], arguments: tuple[Any, ...]) -> tuple[int, float]:
    """Bytes read at least once and operations, by what the op does with its arguments."""
    if op is linear:
        x_TI, weight = arguments[:2]
        outputs, inputs = weight.shape
        return weight.num_bytes + 4 * x_TI.shape[0] * (inputs + outputs), 2.0 * x_TI.shape[0] * inputs * outputs
    if op is attention:
        q_THD, kv, _, rows = arguments[:4]
        return attention_work(q_THD, kv, rows)
    return sum(a.numel() * a.element_size() for a in arguments if isinstance(a, Tensor)), 0.0


def attention_work(q_THD: Tensor, kv: LayerKV, rows: Rows) -> tuple[int, float]:
    """Keys and values of every row once; two products of each query with each key it sees."""
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, element = kv.k_NKDS.shape[1], kv.k_NKDS.element_size()
    keys = sum(start + count for start, count in zip(rows.starts, rows.num_new, strict=True))
    seen = sum(n * start + n * (n + 1) / 2 for start, n in zip(rows.starts, rows.num_new, strict=True))
    return 2 * keys * num_kv_heads * head_dim * element, 4.0 * seen * num_heads * head_dim


def product_gflop_per_s() -> float:
    """Speed of PyTorch's float32 matrix product with the threads in use: the best of five."""
    side = 1536
    a, b = torch.randn(side, side), torch.randn(side, side)
    return 2 * side**3 / min(lib.timed(lambda: a @ b) for _ in range(5)) / 1e9


if __name__ == "__main__":
    main()
