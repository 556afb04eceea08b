"""Every op on the sizes of real models: time, and the bytes and products per second beside what the machine can do.

The ceiling of an op that reads much is the speed of memory, of one that multiplies much that of a large matrix product
(float32 on a CPU, bfloat16 on a GPU); each line shows the one that is nearer, and which provider ran. Weights and
caches take turns among copies, so that none is in a cache that a real step would have flushed. On a GPU, calls are
replayed from a CUDA graph, as decode steps are; those that cannot be captured are timed as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import lib
from troth.ops import registry
from troth.ops.attention import attention
from troth.ops.copy_blocks import copy_blocks
from troth.ops.experts import RawExperts, Routing, experts, pack_experts
from troth.ops.grid import Case, Inputs
from troth.ops.impl import cpu
from troth.ops.layer_kv import LayerKV
from troth.ops.linear import RawLinearWeight, linear, pack
from troth.ops.registry import Op
from troth.ops.rows import Rows

TESTS = {
    "cpu": ("tests/cpu/test_op_linear.py", "tests/cpu/test_op_attention.py", "tests/cpu/test_op_norms.py"),
    "cuda": ("tests/device/test_ops.py",),
}
COPIES_BYTES = {"cpu": 256 * 2**20, "cuda": 512 * 2**20}
"""Arguments of one case, all copies together: several times any last-level cache here."""
MAX_COPIES = 8
SECONDS = 0.4
"""Of measuring each case on a CPU."""
REPLAYED_CALLS = 32
REPLAYS = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the ops run, and what it can do at best."""

    device: torch.device
    dtype: torch.dtype
    memory_gb_per_s: float
    products_gflop_per_s: float
    timed: Callable[[list[Callable[[], object]]], float]
    """Median seconds of one call of several that take turns."""


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", help="ops whose name contains this")
    arguments = parser.parse_args()
    lib.gate(TESTS[arguments.device], arguments)
    registry.activate()
    torch.set_num_threads(arguments.threads)
    if cpu.unavailable() is None:
        cpu.start(arguments.threads)
    machine = gpu() if arguments.device == "cuda" else processor(arguments.threads)
    memory, products = machine.memory_gb_per_s, machine.products_gflop_per_s
    print(f"memory {memory:.1f} GB/s, {str(machine.dtype)[6:]} products {products:.0f} GFLOP/s")
    figures: dict[str, dict[str, float]] = {}
    providers: dict[str, str] = {}
    with torch.inference_mode():
        for op, case in timed_cases(arguments.only):
            seconds, num_bytes, flops, provider = measure(op, case, machine)
            share = max(num_bytes / seconds / 1e9 / memory, flops / seconds / 1e9 / products)
            name = f"{op.name} {case.name}"
            providers[name] = provider
            figures[name] = {
                "us": seconds * 1e6,
                "gb_per_s": num_bytes / seconds / 1e9,
                "gflop_per_s": flops / seconds / 1e9,
                "share_of_ceiling": share,
            }
            rates = f"{num_bytes / seconds / 1e9:8.1f} GB/s" + (
                f" {flops / seconds / 1e9:8.1f} GFLOP/s" if flops else ""
            )
            print(f"{name:52} {provider:9} {seconds * 1e6:10.1f} us {rates:32} {share:5.2f} of the ceiling")
    options = {
        "device": arguments.device,
        "threads": arguments.threads,
        "kernels": cpu.description() if cpu.unavailable() is None else None,
    }
    result = lib.stamp(options) | {
        "figures": figures,
        "providers": providers,
        "memory_gb_per_s": memory,
        "products_gflop_per_s": products,
    }
    lib.finish(f"ops-{arguments.device}", result, arguments)


def processor(num_threads: int) -> Machine:
    """The CPU with so many threads."""
    return Machine(
        device=torch.device("cpu"),
        dtype=torch.float32,
        memory_gb_per_s=lib.memory_gb_per_s(num_threads),
        products_gflop_per_s=product_gflop_per_s(),
        timed=by_clock,
    )


def gpu() -> Machine:
    """The first CUDA device. Its memory's speed is that of a kernel that reads and writes as much."""
    device = torch.device("cuda")
    source = torch.randn(2**30, device=device).to(torch.bfloat16)
    target = torch.empty_like(source)
    streaming = by_replay([lambda: torch.neg(source, out=target)])
    side = 8192
    a, b = torch.randn(2, side, side, device=device).to(torch.bfloat16)
    multiplying = by_replay([lambda: a @ b])
    return Machine(
        device=device,
        dtype=torch.bfloat16,
        memory_gb_per_s=4 * source.numel() / streaming / 1e9,
        products_gflop_per_s=2 * side**3 / multiplying / 1e9,
        timed=by_replay,
    )


def timed_cases(only: str | None) -> Iterator[tuple[Op[Any, Any], Case]]:
    """Cases of real sizes of every op, or of those named."""
    for op in registry.OPS.values():
        for case in op.grid():
            if case.timed and (only is None or only in op.name):
                yield op, case


def measure(op: Op[Any, Any], case: Case, machine: Machine) -> tuple[float, int, float, str]:
    """Median seconds of a call, the bytes it must move, the operations it must do, and who does them."""
    first = arguments_of(case, machine, 0)
    num_bytes, flops = work(op, first)
    copies = max(1, min(MAX_COPIES, COPIES_BYTES[machine.device.type] // max(1, num_bytes)))
    turns = [first] + [arguments_of(case, machine, seed) for seed in range(1, copies)]
    calls: list[Callable[[], object]] = [lambda turn=turn: op(*turn) for turn in turns]  # type: ignore[misc]
    return machine.timed(calls), num_bytes, flops, provider_of(op, first)


def provider_of(op: Op[Any, Any], arguments: tuple[Any, ...]) -> str:
    """The first active provider that takes the arguments."""
    takers = (name for name in op.active if op.implementations[name].supports(*arguments))
    return next(takers, registry.REFERENCE)


def by_clock(calls: list[Callable[[], object]]) -> float:
    """Median seconds of a call, by the host's clock."""
    for call in calls:
        call()
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < 5:
        times.append(lib.timed(calls[len(times) % len(calls)]))
    return sorted(times)[len(times) // 2]


def by_replay(calls: list[Callable[[], object]]) -> float:
    """Median seconds of a call on the GPU: of replays of a graph of many, or one by one where that cannot be."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for n in range(REPLAYED_CALLS):
                calls[n % len(calls)]()
    except RuntimeError:  # the call waits for the device, or copies from the host
        torch.cuda.synchronize()
        return sorted(device_seconds(call) for call in (calls * REPLAYS)[:REPLAYS])[REPLAYS // 2]
    graph.replay()
    return sorted(device_seconds(graph.replay) for _ in range(REPLAYS))[REPLAYS // 2] / REPLAYED_CALLS


def device_seconds(call: Callable[[], object]) -> float:
    """Between two events of the GPU around one call."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def arguments_of(case: Case, machine: Machine, seed: int) -> tuple[Any, ...]:
    """A call's arguments, weights in the form that a model has them in."""

    def in_form(argument: Any) -> Any:
        if isinstance(argument, RawExperts):
            return pack_experts(argument, machine.dtype, machine.device)
        is_weight = isinstance(argument, RawLinearWeight)
        return pack(argument.parts, machine.dtype, machine.device) if is_weight else argument

    return tuple(map(in_form, case.make(Inputs(machine.dtype, machine.device, seed))))


def work(op: Op[Any, Any], arguments: tuple[Any, ...]) -> tuple[int, float]:
    """Bytes read at least once and operations, by what the op does with its arguments."""
    if op is linear:
        x_TI, weight = arguments[:2]
        outputs, inputs = weight.shape
        moved = weight.num_bytes + x_TI.element_size() * x_TI.shape[0] * (inputs + outputs)
        return moved, 2.0 * x_TI.shape[0] * inputs * outputs
    if op is experts:
        return experts_work(*arguments[1:5])
    if op is attention:
        q_THD, kv, _, rows = arguments[:4]
        return attention_work(q_THD, kv, rows)
    if op is copy_blocks:
        source_R, _, kv = arguments
        return sum(2 * len(source_R) * tensor[0].nbytes for tensor in kv.tensors().values()), 0.0
    return sum(a.numel() * a.element_size() for a in arguments if isinstance(a, Tensor)), 0.0


def attention_work(q_THD: Tensor, kv: LayerKV, rows: Rows) -> tuple[int, float]:
    """Keys and values of every row once; two products of each query with each key it sees."""
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, scale_bytes = kv.k_NKDS.shape[1], 0 if kv.k_scale_NKS is None else kv.k_scale_NKS.element_size()
    row_bytes = head_dim * kv.k_NKDS.element_size() + scale_bytes
    keys = sum(start + count for start, count in zip(rows.starts, rows.num_new, strict=True))
    seen = sum(n * start + n * (n + 1) / 2 for start, n in zip(rows.starts, rows.num_new, strict=True))
    return 2 * keys * num_kv_heads * row_bytes, 4.0 * seen * num_heads * head_dim


def experts_work(scores_TF: Tensor, shared_TD: Tensor, weights: Any, routing: Routing) -> tuple[int, float]:
    """The experts that tokens chose, once; three products of each token with each of its experts."""
    chosen_TK = routing.choose(scores_TF[:, :-1])[0]
    count, width, inner = weights.shape
    moved = weights.num_bytes * len(chosen_TK.unique()) // count + 3 * shared_TD.nbytes
    return moved, 6.0 * chosen_TK.numel() * width * inner


def product_gflop_per_s() -> float:
    """Speed of PyTorch's float32 matrix product with the threads in use: the best of five."""
    side = 1536
    a, b = torch.randn(side, side), torch.randn(side, side)
    return 2 * side**3 / min(lib.timed(lambda: a @ b) for _ in range(5)) / 1e9


if __name__ == "__main__":
    main()
