"""Kernels that are noted, compiled side by side, and then launched; run by ``test_op_triton.py``.

Triton compiles them for a GPU that is not there: a driver stands in that remembers launches. A process of its own.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver

from troth.contracts.progress import no_progress
from troth.ops.impl import triton_ahead
from troth.ops.impl.triton_ahead import REPEATED_LAUNCHES, CompileAhead
from troth.run import rehearsal
from troth.run.first_kernels import compile_first


class Launcher:
    """Of one kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._name = metadata.name
        BUILT.append(threading.current_thread().name)

    def __call__(self, *arguments: object) -> None:
        LAUNCHED.append(self._name)


LAUNCHED: list[str] = []
BUILT: list[str] = []
"""The thread that built each launcher."""
COMPILED: list[tuple[str, str]] = []
"""Kernel, and the thread that compiled it."""


class Utilities:
    """What Triton asks of a device."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**18}

    def load_binary(self, *binary: object) -> tuple[object, int, int, int, int]:
        return object(), 1, 0, 0, 1024


class Hopper:
    """As ``triton_forms.py``'s, with launches."""

    launcher_cls = Launcher
    utils = Utilities()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


driver.set_active(Hopper())


@triton.jit
def doubled(x: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = x + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))


@triton.jit
def halved(x: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) / 2)


@triton.jit
def broken(x: tl.tensor, BLOCK: tl.constexpr) -> None:
    tl.store(x, tl.arange(0, BLOCK) + tl.arange(0, 2 * BLOCK))


def _compiled(src: Any, cache_hit: bool, **_: object) -> None:
    COMPILED.append((src.name, "from disk" if cache_hit else threading.current_thread().name))


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", _compiled)
    for kernel in (doubled, halved, broken):
        kernel.device_caches.clear()
    LAUNCHED.clear()
    BUILT.clear()
    COMPILED.clear()


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(64, dtype=dtype)


def test_noted_kernels_are_not_launched_until_they_are_compiled_by_other_threads() -> None:
    with CompileAhead() as ahead:
        with ahead.noting():
            for dtype in (torch.float32, torch.float32, torch.bfloat16):
                doubled[(1,)](numbers(dtype), BLOCK=64)
            halved[(1,)](numbers(), BLOCK=64)
        assert ahead.num_noted == 3
        assert (LAUNCHED, COMPILED) == ([], [])
        assert ahead.wait(60)
        assert ahead.num_done == 3
    assert sorted(name for name, _ in COMPILED) == ["doubled", "doubled", "halved"]
    assert all(thread.startswith("troth-compile") for _, thread in COMPILED)
    assert len(BUILT) == 3
    assert all(thread.startswith("troth-compile") for thread in BUILT)
    doubled[(1,)](numbers(torch.bfloat16), BLOCK=64)
    halved[(1,)](numbers(), BLOCK=64)
    assert LAUNCHED == ["doubled", "halved"]
    assert len(COMPILED) == 3, "a launch compiled again what was compiled ahead"


def test_kernels_that_are_compiled_already_are_launched_while_others_are_noted() -> None:
    halved[(1,)](numbers(), BLOCK=64)
    with CompileAhead() as ahead:
        with ahead.noting():
            halved[(1,)](numbers(), BLOCK=64)
            doubled[(1,)](numbers(), BLOCK=64)
        assert ahead.num_noted == 1
    assert LAUNCHED == ["halved", "halved"]


def test_launches_of_other_threads_are_made_while_one_takes_notes() -> None:
    """Another engine of this process must not lose a kernel."""
    with CompileAhead() as ahead, ahead.noting():
        other = threading.Thread(target=lambda: doubled[(1,)](numbers(), BLOCK=64), name="another engine")
        other.start()
        other.join()
        assert ahead.num_noted == 0
    assert LAUNCHED == ["doubled"]
    assert COMPILED == [("doubled", "another engine")]


@pytest.mark.parametrize("error", [ValueError, None])
def test_launches_are_made_again_after_notes_however_they_ended(error: type[Exception] | None) -> None:
    with CompileAhead() as ahead:
        try:
            with ahead.noting():
                if error is not None:
                    raise error
        except ValueError:
            assert error is ValueError
        doubled[(1,)](numbers(), BLOCK=64)
    assert LAUNCHED == ["doubled"]


def test_a_step_is_left_once_it_launches_nothing_new() -> None:
    num_launches = 0
    with CompileAhead() as ahead, ahead.noting():
        halved[(1,)](numbers(), BLOCK=64)
        for num_launches in range(1, 1000):  # noqa: B007
            doubled[(1,)](numbers(), BLOCK=64)
    assert REPEATED_LAUNCHES < num_launches < REPEATED_LAUNCHES + 5
    assert ahead.num_noted == 2
    doubled[(1,)](numbers(), BLOCK=64)
    assert LAUNCHED == ["doubled"]


def test_a_kernel_that_cannot_be_compiled_fails_at_its_launch_and_nothing_else() -> None:
    with CompileAhead() as ahead:
        with ahead.noting():
            broken[(1,)](numbers(), BLOCK=64)
            doubled[(1,)](numbers(), BLOCK=64)
        assert ahead.wait(60)
        assert ahead.num_done == 2
    doubled[(1,)](numbers(), BLOCK=64)
    with pytest.raises(CompilationError):
        broken[(1,)](numbers(), BLOCK=64)
    assert LAUNCHED == ["doubled"]


def test_what_others_ask_triton_to_do_before_it_compiles_is_still_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def theirs(**launch: Any) -> None:
        asked.append(launch["fn"].name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", theirs)
    with CompileAhead() as ahead, ahead.noting():
        doubled[(1,)](numbers(), BLOCK=64)
    halved[(1,)](numbers(), BLOCK=64)
    assert asked == ["halved"]
    assert LAUNCHED == ["halved"]


@triton.jit
def absolute(x: tl.tensor) -> tl.tensor:
    return tl.abs(x)


@triton.jit
def activated(x: tl.tensor, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr) -> None:
    at = x + tl.arange(0, BLOCK)
    tl.store(at, ACTIVATION(tl.load(at)))


def test_kernels_that_triton_cannot_write_down_are_launched_after_notes_were_taken() -> None:
    """Another library's, in a process in which an engine was loaded: a function is no JSON."""
    with CompileAhead() as ahead, ahead.noting():
        doubled[(1,)](numbers(), BLOCK=64)
    activated[(1,)](numbers(), BLOCK=64, ACTIVATION=absolute)
    assert LAUNCHED == ["activated"]


def test_whoever_leaves_while_kernels_are_compiled_leaves_a_few_behind() -> None:
    """Threads get one kernel each: neither a request nor the program's end waits for all that was noted."""
    with CompileAhead() as ahead:
        with ahead.noting():
            for number in range(40):
                doubled[(1,)](numbers(), BLOCK=64, num_warps=1 << number % 4, num_stages=1 + number // 4)
        assert ahead.num_noted == 40
        assert not ahead.wait(0.01)
    for thread in threading.enumerate():
        if thread.name.startswith("troth-compile"):
            thread.join(60)
    assert 0 < len(COMPILED) <= triton_ahead.MOST_THREADS


def test_what_could_not_be_compiled_ahead_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(Hopper, "launcher_cls", fails)
    with CompileAhead() as ahead:
        with ahead.noting():
            doubled[(1,)](numbers(), BLOCK=64)
        assert ahead.wait(60)
    assert (
        "1 of 1 kernels could not be compiled ahead of their launch; the first: RuntimeError('no C compiler')"
        in caplog.text
    )


def test_a_load_compiles_side_by_side_what_its_steps_launch_and_launches_none_of_it() -> None:
    told: list[tuple[str, int, int]] = []
    in_inference: list[bool] = []

    def step(kernel: Any) -> None:
        in_inference.append(torch.is_inference_mode_enabled())
        kernel[(1,)](numbers(), BLOCK=64)

    compile_first((partial(step, kernel) for kernel in (doubled, halved, doubled)), lambda *state: told.append(state))
    assert LAUNCHED == []
    assert sorted(name for name, _ in COMPILED) == ["doubled", "halved"]
    assert in_inference == [True, True, True]
    assert told[-1] == ("compiling kernels", 2, 2)


def test_a_load_without_room_for_a_step_compiles_what_it_has_seen() -> None:
    def full() -> None:
        raise torch.OutOfMemoryError

    compile_first([lambda: doubled[(1,)](numbers(), BLOCK=64), full, lambda: pytest.fail("went on")], no_progress)
    assert [name for name, _ in COMPILED] == ["doubled"]


class Padding:
    """Of a rehearsal: the first two steps launch one kernel, the third another one."""

    def forward(self, step: rehearsal.Step) -> None:
        (doubled, doubled, halved)[step.tokens][(1,)](numbers(), BLOCK=64)

    def logits(self, num_tokens: object) -> None:
        doubled[(1,)](numbers(), BLOCK=64)


def test_a_rehearsal_compiles_before_it_computes_and_takes_no_notes_between_pieces() -> None:
    every = tuple(rehearsal.Step(1, tokens, 1, 1) for tokens in range(3))
    pieces = rehearsal._compiled(Padding(), every, torch.device("cuda"))  # type: ignore[arg-type]
    next(pieces)
    halved[(1,)](numbers(), BLOCK=64)
    assert LAUNCHED == ["halved"], "a request's launch became a note"
    for _ in pieces:
        pass
    ahead = [name for name, thread in COMPILED if thread.startswith("troth-compile")]
    assert sorted(ahead) == ["doubled"]
