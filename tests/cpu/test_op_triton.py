"""The Triton provider: its kernels by the interpreter, in a process of their own, and where it says it cannot run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from troth.ops import registry
from troth.ops.impl import triton

ROOT = Path(__file__).parents[2]
WITHOUT = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")


@WITHOUT
def test_triton_kernels_equal_their_references_in_the_interpreter() -> None:
    """Every failure of ``triton_kernels.py`` and ``triton_steps.py`` is shown."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/cpu/triton_kernels.py", "tests/cpu/triton_steps.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@WITHOUT
@pytest.mark.parametrize("file", ["triton_forms.py", "triton_compiling.py"])
def test_triton_kernels_are_compiled_before_requests_come(file: str) -> None:
    """Every failure of the file is shown; each puts another thing in the place of Triton's driver."""
    command = [sys.executable, "-m", "pytest", "-q", f"tests/cpu/{file}"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_triton_says_why_it_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert str(triton.unavailable()).startswith("PyTorch sees no NVIDIA GPU")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton.unavailable() == "the package triton is not installed"


@pytest.mark.skipif(torch.cuda.is_available() or triton.INTERPRETED, reason="the kernels run here")
def test_triton_is_left_out_where_it_cannot_run_and_never_imported() -> None:
    loaded = "sys.exit('troth.ops.impl.triton_norm' in sys.modules)"
    code = f"import sys; from troth.ops import registry; registry.activate(); {loaded}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (status,) = [s for s in registry.activate() if s.name == "triton"]
    assert (status.active, status.reason) == (False, triton.unavailable())


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_power_of_2_is_the_least_that_is_not_below(n: int, power: int) -> None:
    assert triton.power_of_2(n) == power
