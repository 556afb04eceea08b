"""What steps cost: measured where the system tells, short steps standing for long ones, and unknown elsewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.disk_world import CPU
from troth.cache import peak_memory
from troth.cache.peak_memory import peak_bytes
from troth.contracts.cache_spec import AttentionSpec
from troth.run.step_cost import GRAIN_BYTES, StepTrial

SPEC = AttentionSpec(layers=(0,), num_kv_heads=1, head_dim=4, value_dim=4, element_bytes=4)
MIB = 2**20
VOCAB = 50


class Watched:
    """A model that computes nothing and notes what it was asked for."""

    def __init__(self) -> None:
        self.num_tokens: list[int] = []
        self.num_logits: list[int] = []

    def forward(self, batch: Any, cache: Any) -> Tensor:
        self.num_tokens.append(len(batch.token_ids_T))
        self.num_logits.append(0)
        return torch.zeros(len(batch.token_ids_T), 4)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        self.num_logits[-1] = len(hidden_SD)
        return torch.zeros(len(hidden_SD), VOCAB)


class Meter:
    """Says what a step of the model takes, if anything can be said: so much, and so much more for each token."""

    def __init__(self, model: Watched, per_token: int, per_logits: int, *, fails_at: int | None = None) -> None:
        self._model = model
        self._per_token = per_token
        self._per_logits = per_logits
        self._fails_at = fails_at

    def __call__(self, device: torch.device, work: Callable[[], None]) -> int | None:
        work()
        num_tokens, num_logits = self._model.num_tokens[-1], self._model.num_logits[-1]
        if num_tokens == self._fails_at:
            return None
        forward = (MIB if num_tokens > 1 else 0) + num_tokens * self._per_token
        return max(forward, num_logits * self._per_logits)


def measured(step_tokens: int, **meter: Any) -> tuple[int | None, int, Watched]:
    model = Watched()
    peak = Meter(model, **{"per_token": MIB // 4, "per_logits": 1000} | meter)
    made: Any = model
    trial = StepTrial(made, (SPEC,), max_samples=64, kv_dtype=torch.float32, device=CPU, peak=peak)
    cost = trial.measure(step_tokens)
    assert cost.seconds > 0
    return cost.transient_bytes, cost.num_tokens, model


def test_step_cost_of_a_long_step_goes_on_in_a_line_from_short_ones() -> None:
    transient_bytes, num_tokens, model = measured(256)
    assert transient_bytes == MIB + 256 * MIB // 4
    assert num_tokens == 64 == max(model.num_tokens), "a CPU would take seconds for the whole"
    assert model.num_tokens[0] == 16 == model.num_tokens[1], "the first step reads weights, which is not its memory"


def test_step_cost_is_that_of_the_logits_where_they_take_more() -> None:
    transient_bytes, _, model = measured(256, per_logits=10 * MIB)
    assert transient_bytes == 640 * MIB
    assert max(model.num_logits) == 16


@pytest.mark.parametrize("step_tokens", [9, 16, 40])
def test_step_cost_of_a_short_step_is_measured_itself(step_tokens: int) -> None:
    transient_bytes, num_tokens, model = measured(step_tokens)
    assert transient_bytes == -(-(MIB + step_tokens * MIB // 4) // GRAIN_BYTES) * GRAIN_BYTES
    assert num_tokens == step_tokens == max(model.num_tokens)


@pytest.mark.parametrize("fails_at", [1, 16, 64])
def test_step_cost_is_not_known_where_a_measurement_fails(fails_at: int) -> None:
    assert measured(256, fails_at=fails_at)[0] is None


ALONE = """
import numpy, torch
from troth.cache.peak_memory import peak_bytes

def work():
    numpy.ones(40 * 2**20, dtype=numpy.uint8)
    numpy.ones(5 * 2**20, dtype=numpy.uint8)

held = numpy.ones(30 * 2**20, dtype=numpy.uint8)
del held  # ready to be used again, which must not hide what the work takes
for _ in range(2):
    print(peak_bytes(torch.device("cpu"), work))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_bytes_counts_what_was_held_at_once_and_freed_again() -> None:
    """In a process of its own: threads that other tests left behind take memory, too."""
    ran = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True, timeout=120)
    found = [int(line) for line in ran.stdout.split()]
    assert len(found) == 2
    assert all(38 * MIB < one < 46 * MIB for one in found), found


def test_peak_bytes_are_unknown_where_the_system_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(peak_memory, "_CLEAR", tmp_path / "no" / "file")
    assert peak_bytes(CPU, lambda: done.append(1)) is None
    monkeypatch.setattr(peak_memory, "_CLEAR", tmp_path / "file")
    (tmp_path / "status").write_text("Name: troth\nVmRSS: many kB\n")
    monkeypatch.setattr(peak_memory, "_STATUS", tmp_path / "status")
    assert peak_bytes(CPU, lambda: done.append(2)) is None
    (tmp_path / "status").write_text("VmRSS: 5 kB\n")
    assert peak_bytes(CPU, lambda: done.append(3)) is None
    assert done == [1, 2, 3], "the work is done whatever can be told"


def test_peak_bytes_of_a_device_are_those_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    allocated = iter([700, 900])
    meter = SimpleNamespace(
        synchronize=lambda device: calls.append("synchronize"),
        memory_allocated=lambda device: next(allocated),
        reset_peak_memory_stats=lambda device: calls.append("reset"),
        max_memory_allocated=lambda device: 1500,
    )
    monkeypatch.setattr(torch, "cuda", meter)
    assert peak_bytes(torch.device("cuda"), lambda: calls.append("work")) == 800
    assert calls == ["synchronize", "reset", "work", "synchronize"]
