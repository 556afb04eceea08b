"""What a fault on the card ends, and what it leaves: a step without memory, a kernel that was killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import laws
from tests.cpu.test_laws import FAMILIES, requests
from tests.cpu.tiny_models import random_ids, random_model, save
from tests.device.engines import builder
from troth.contracts.events import Failed
from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.errors import DeviceLost
from troth.nn.batch import Batch
from troth.nn.decoder import Decoder
from troth.ops import registry

pytestmark = pytest.mark.device
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
GPU = torch.device("cuda")
ROOT = Path(__file__).parents[2]
LONG = 150
"""Tokens of the prompt whose step meets the fault."""


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    registry.activate()
    return save(random_model(FAMILIES["qwen3"]), tmp_path_factory.mktemp("qwen3"))


def asking(name: str, num_prompt: int, num_tokens: int) -> Request:
    request = replace(requests()[0], request_id=RequestId(name), prompt_ids=tuple(random_ids(num_prompt, seed=7)))
    return replace(request, max_tokens=num_tokens, eos_ids=frozenset())


def with_fault(forward: Callable[..., Any], fault: Callable[[], None]) -> Callable[..., Any]:
    """The model's forward pass, which meets a fault half way through a step with a long prompt."""

    def faulty(self: Decoder, batch: Batch, cache: Any) -> Any:
        if LONG in batch.rows.num_new:
            fault()
        return forward(self, batch, cache)

    return faulty


def fill_the_card() -> None:
    torch.empty(2**46, dtype=torch.uint8, device=GPU)


def kill_a_kernel() -> None:
    """An index past a tensor's end: the kernel's own check stops it, and with it all work of the process."""
    torch.zeros(4, device=GPU)[torch.tensor([1 << 20], device=GPU)]


def failure_of(sink: laws.Collector) -> str | None:
    end = sink.events[-1]
    return end.kind if isinstance(end, Failed) else None


def test_a_step_without_memory_ends_its_own_rows_and_the_engine_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows decode when the long prompt joins their step; a fourth request waits for a row."""
    build, serving = builder(path, GPU, torch.float32), laws.Serving(max_rows=3)
    early, late = asking("early", 20, 40), asking("late", 12, 9)
    want = laws.alone(build, [early, late], serving)
    loop, scheduler = build(serving)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    sinks = [laws.Collector() for _ in range(4)]
    for request, sink in zip((early, replace(early, request_id=RequestId("beside"))), sinks, strict=False):
        loop.add(request, sink)
    for _ in range(6):
        loop.step()
    loop.add(asking("long", LONG, 5), sinks[2])
    loop.add(late, sinks[3])
    with monkeypatch.context() as fault:
        fault.setattr(Decoder, "forward", with_fault(Decoder.forward, fill_the_card))
        loop.step()
        while failure_of(sinks[2]) is None:
            loop.step()
    while loop.step():
        pass
    assert [failure_of(sink) for sink in sinks] == ["OutOfMemory"] * 3 + [None]
    laws.assert_same([sinks[3].answer()], want[1:])
    assert all(pool.num_used == 0 for pool in scheduler.pools)
    laws.assert_same(laws.serve_on(loop, scheduler, [early]), want[:1])
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20, "the failed step left memory behind"


def serve_until_killed(path: str) -> None:
    """Run by the test below in a process of its own: the device is lost to it."""
    registry.activate()
    loop, _scheduler = builder(Path(path), GPU, torch.float32)(laws.Serving(max_rows=3))
    sinks = [laws.Collector() for _ in range(3)]
    loop.add(asking("early", 20, 60), sinks[0])
    for _ in range(6):
        loop.step()
    Decoder.forward = with_fault(Decoder.forward, kill_a_kernel)  # type: ignore[method-assign]
    loop.add(asking("long", LONG, 5), sinks[1])
    try:
        while loop.step():
            pass
    except DeviceLost as error:
        loop.add(asking("late", 5, 5), sinks[2])
        loop.close(error)
    print([failure_of(sink) for sink in sinks])


def test_a_killed_kernel_ends_every_request_with_device_lost(path: Path) -> None:
    code = f"from tests.device.test_faults import serve_until_killed; serve_until_killed({str(path)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip().endswith(str(["DeviceLost"] * 3)), done.stdout + done.stderr[-3000:]
