"""Kernels compiled side by side, ahead of the launches that would compile them one after the other.

Steps are gone through once for their launches alone: what is not compiled yet is noted, and not launched. Then all of
it is compiled by threads: Python is held up by a kernel's first stage only, a quarter of the time; the others, and the
assembler, run beside each other. Refuses to know steps: ``run/first_kernels.py`` and ``run/rehearsal.py`` do.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import local
from types import TracebackType
from typing import Any, Final

import torch
import triton

from troth.config.facts import num_cores

MOST_THREADS: Final = 8
"""More compile nothing faster, because of the stage that is Python's."""
REPEATED_LAUNCHES: Final = 64
"""Noted launches in a row of which none is new, after which a step is left: its layers repeat, at the latest after six,
of ten launches each. To note one takes half a millisecond."""


class CompileAhead:
    """Owns the threads, and knows what was noted. Ends them as a context manager.

    Args:
        device: for which kernels are compiled.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, num_cores()), thread_name_prefix="troth-compile")
        self._noted: dict[tuple[Any, str], str] = {}
        self._num_repeated = 0
        self._orders: list[Future[Any]] = []

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

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

    def start(self) -> None:
        """Compile all that was noted, from now on; once."""
        for (kernel, _), form in self._noted.items():
            self._orders.append(self._threads.submit(self._compile, kernel, form))

    @property
    def num_noted(self) -> int:
        """Kernels, each in one form."""
        return len(self._noted)

    @property
    def num_done(self) -> int:
        """Of those, how many are compiled, or cannot be: then their launch says why."""
        return sum(order.done() for order in self._orders)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all are done, at most so long; whether they are."""
        return not wait(self._orders, timeout_s).not_done

    def _compile(self, kernel: Any, form: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        compiled = kernel.preload(form)
        # Its launcher is C, built by the system's compiler and kept beside it; this one is thrown away, since a kernel
        # that loads itself in one thread must not be launched by another.
        triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)

    def note(self, kernel: Any, key: str, form: str) -> None:
        """Remember a launch.

        Args:
            kernel: a Triton function.
            key: of its form.
            form: what Triton wrote down of it, for ``JITFunction.preload``.
        """
        self._num_repeated = self._num_repeated + 1 if (kernel, key) in self._noted else 0
        self._noted[kernel, key] = form
        if self._num_repeated > REPEATED_LAUNCHES:
            raise _Repeats


class _Repeats(Exception):
    """A step launches nothing new any more."""


_noting = local()


def _install() -> None:
    """Have Triton ask before it compiles. For good: who is asked depends on the thread, and most say nothing."""
    runtime = triton.knobs.runtime
    before = runtime.jit_cache_hook
    if getattr(before, "is_ours", False):
        return

    def asked(**launch: Any) -> bool | None:
        by: CompileAhead | None = getattr(_noting, "by", None)
        if by is None:
            return before(**launch) if before is not None else None
        by.note(launch["fn"].jit_function, launch["key"], launch["compile"]["specialization_data"])
        return True

    asked.is_ours = True  # type: ignore[attr-defined]
    runtime.jit_cache_hook = asked
