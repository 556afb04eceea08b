"""Kernels compiled side by side, ahead of the launches that would compile them one after the other.

Steps are gone through once for their launches alone: what is not compiled yet is noted, and not launched. Then all of
it is compiled by threads: Python is held up by a kernel's first stage only, a quarter of the time; the others, and the
assembler, run beside each other. Refuses to know steps: ``run/first_kernels.py`` and ``run/rehearsal.py`` do.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import local
from types import TracebackType
from typing import Any, Final

import torch
import triton

from troth.config.facts import num_cores

MOST_THREADS: Final = 8
"""More compile nothing faster, because of the stage that is Python's."""
REPEATED_LAUNCHES: Final = 96
"""Noted launches in a row of which none is new, after which a step is left: its layers repeat, at the latest after six
(Gemma 3: five with a window, of twelve launches each). To note one takes half a millisecond."""

_log = logging.getLogger("troth")


class CompileAhead:
    """Owns the threads, and knows what was noted. Ends them as a context manager; used by one thread."""

    def __init__(self) -> None:
        self._num_threads = min(MOST_THREADS, num_cores())
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="troth-compile")
        self._noted: dict[tuple[Any, str], str] = {}
        self._num_repeated = 0
        self._waiting: deque[tuple[Any, str]] = deque()
        self._running: set[Future[None]] = set()
        self._errors: list[BaseException] = []
        self.num_done = 0
        """Kernels that are compiled, or cannot be: then their launch says why."""

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._errors:
            _log.warning(
                "%d of %d kernels could not be compiled ahead of their launch; the first: %r",
                len(self._errors),
                self.num_noted,
                self._errors[0],
            )

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Launches by this thread of kernels that are not compiled are noted: what they would write stays as it was.

        Other launches are made, and read that; so whatever decides where a kernel reads or writes must not come from
        one. What is inside may be left before its end, once it launches nothing new.
        """
        _install()
        _noting.by, self._num_repeated = self, 0
        try:
            yield
        except _Repeats:
            pass
        finally:
            _noting.by = None

    @property
    def num_noted(self) -> int:
        """Kernels, each in one form."""
        return len(self._noted)

    def wait(self, timeout_s: float) -> bool:
        """Compile what was noted, at most so long; whether all is done.

        Threads have one kernel each and get the next one here: who does not come back leaves no more than that behind.
        """
        ends = time.monotonic() + timeout_s
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._num_threads:
                # Kernels are kept by the device that is current where they are launched.
                self._running.add(self._threads.submit(_compile, *self._waiting.popleft(), _current_device()))
            done, self._running = wait(self._running, max(0.0, ends - time.monotonic()), FIRST_COMPLETED)
            self.num_done += len(done)
            self._errors += [error for one in done if (error := one.exception()) is not None]
            if not done:
                return False
        return True

    def note(self, kernel: Any, key: str, form: str) -> None:
        """Remember a launch.

        Args:
            kernel: a Triton function.
            key: of its form.
            form: what Triton wrote down of it, for ``JITFunction.preload``.
        """
        is_known = (kernel, key) in self._noted
        self._num_repeated = self._num_repeated + 1 if is_known else 0
        if not is_known:
            self._noted[kernel, key] = form
            self._waiting.append((kernel, form))
        if self._num_repeated > REPEATED_LAUNCHES:
            raise _Repeats


class _Repeats(Exception):
    """A step launches nothing new any more."""


def _current_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _compile(kernel: Any, form: str, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    compiled = kernel.preload(form)
    # Its launcher is C, built by the system's compiler and kept on disk; this one is thrown away, since what a kernel
    # loads of itself at its first launch is the launching thread's business.
    triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


_noting = local()


class _Asked:
    """Triton's question before it compiles: whether somebody else takes care of it. False where nobody takes notes and
    nobody asked before: then Triton does not even write the form down, which it cannot do for every kernel.
    """

    def __init__(self, before: Callable[..., bool | None] | None) -> None:
        self._before = before

    def __bool__(self) -> bool:
        return getattr(_noting, "by", None) is not None or bool(self._before)

    def __call__(self, **launch: Any) -> bool | None:
        by: CompileAhead | None = getattr(_noting, "by", None)
        if by is None:
            return self._before(**launch) if self._before else None
        if launch["is_manual_warmup"]:
            return None
        by.note(launch["fn"].jit_function, launch["key"], launch["compile"]["specialization_data"])
        return True


def _install() -> None:
    """Have Triton ask. For good: who is asked depends on the thread."""
    runtime = triton.knobs.runtime
    if not isinstance(runtime.jit_cache_hook, _Asked):
        runtime.jit_cache_hook = _Asked(runtime.jit_cache_hook)
