"""Ops called from several threads at once, as by two engines of one process."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from troth.ops.impl import cpu
from troth.ops.linear import linear, pack

NUM_THREADS = 3
ROUNDS = 40
WIDTH = 1024


@pytest.mark.parametrize("recorded", [False, True])
def test_ops_of_several_threads_do_not_meet(recorded: bool) -> None:
    """The C++ kernels had one pool and one tape for all: engines computed each other's tokens.

    Each thread chains products, so that one wrong result is carried to the end.
    """
    torch.manual_seed(0)
    weights = [
        pack([torch.randn(WIDTH, WIDTH) / WIDTH**0.5], torch.float32, torch.device("cpu")) for _ in range(NUM_THREADS)
    ]
    inputs = torch.randn(NUM_THREADS, 5, WIDTH)
    start = threading.Barrier(NUM_THREADS, timeout=60)
    records = recorded and "cpu" in linear.active

    def product(index: int) -> Tensor:
        x_TI = inputs[index]
        for _ in range(ROUNDS):
            x_TI = linear(x_TI, weights[index])
        return x_TI

    def together(index: int) -> Tensor:
        start.wait()
        with cpu.recording() if records else nullcontext() as tape:
            result = product(index)
        if tape is not None:
            tape.spoil()
            tape.run()
        return result

    alone = [product(index) for index in range(NUM_THREADS)]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for result, expected in zip(pool.map(together, range(NUM_THREADS)), alone, strict=True):
            assert torch.equal(result, expected)


@pytest.mark.skipif(bool(cpu.unavailable()), reason="the kernels are not built")
def test_recording_loads_no_compiler() -> None:
    """PyTorch's is 900 modules, which would be loaded in the middle of the first answer."""
    code = (
        "import sys, torch; from troth.ops.impl import cpu; cpu.start(1)\n"
        "with cpu.recording():\n    torch.ones(2) + 1\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(bool(cpu.unavailable()), reason="the kernels are not built")
def test_tape_runs_again_where_no_operation_is_between_two_calls() -> None:
    """A pool's workers took a run of nothing for the one after it: wrong products, then threads that wait for good."""
    code = (
        "import torch\n"
        "from troth.ops import registry\n"
        "from troth.ops.impl import cpu\n"
        "from troth.ops.linear import linear, pack\n"
        "from troth.ops.multiply import multiply\n"
        "registry.activate()\n"
        "cpu.start(3)\n"
        "weight, x_TI = pack([torch.randn(256, 256) / 16], torch.float32, torch.device('cpu')), torch.randn(3, 256)\n"
        "def chained():\n"
        "    return linear(linear(multiply(multiply(linear(x_TI, weight), x_TI), x_TI), weight), weight)\n"
        "expected = chained()\n"
        "with cpu.recording() as tape:\n"
        "    result = chained()\n"
        "for _ in range(200):\n"
        "    tape.spoil()\n"
        "    tape.run()\n"
        "    assert torch.equal(result, expected)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0
