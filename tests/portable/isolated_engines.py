"""Engine factories that load slowly, fail or misbehave, for processes of their own; imported there without pytest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from troth.contracts.request import Request
from troth.errors import DeviceError, ModelLoadError
from troth.testing.fake_engine import FakeEngine


def build_slowly(options: dict[str, Any], report: Callable[[str, int, int], None]) -> FakeEngine:
    """A factory that reports half its work and then loads until the file in ``options`` exists."""
    report("weights", 1, 2)
    while not os.path.exists(options["until"]):
        time.sleep(0.01)
    return FakeEngine("late")


def build_never(options: dict[str, Any], report: Callable[[str, int, int], None]) -> FakeEngine:
    """A factory that fails the way ``options`` says."""
    if options["how"] == "load":
        raise ModelLoadError("bad magic", path="model.gguf")
    if options["how"] == "bug":
        raise KeyError("lm_head")
    os._exit(7)


def build_blind(options: dict[str, Any], report: Callable[[str, int, int], None]) -> FakeEngine:
    """A factory whose engine raises from submit, or stops answering altogether, even to SIGTERM."""

    class Blind(FakeEngine):
        def submit(self, request: Request) -> Any:
            if options["how"] == "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if options["how"] != "raise":
                time.sleep(3600)
            raise ZeroDivisionError("a bug in an engine")

    return Blind()


def build_mortal(options: dict[str, Any], report: Callable[[str, int, int], None]) -> FakeEngine:
    """A factory whose engine fails for good at a request called fatal."""

    class Mortal(FakeEngine):
        def submit(self, request: Request) -> Any:
            stream = super().submit(request)
            if request.request_id == "fatal":
                self.fail(DeviceError("the engine is broken"))
            return stream

    return Mortal(step_s=0.002)
