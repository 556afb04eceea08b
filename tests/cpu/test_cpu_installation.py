"""What the C++ kernels say of themselves to ``troth doctor``: in use, not built, built for another system, stale."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from troth.ops.impl import cpu


def installed(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """Kernels that import as ``found``, or raise it."""

    def module() -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(cpu, "_module", module)
    spec = None if isinstance(found, ModuleNotFoundError) else object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def test_kernels_in_use_name_their_instruction_set_and_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["avx2", "baseline"]
    installed(monkeypatch, SimpleNamespace(INTERFACE=cpu.INTERFACE, instruction_sets=lambda: names))
    assert (cpu.unavailable(), cpu.is_broken()) == (None, False)
    assert cpu.about() == "active with avx2 kernels; this processor also runs baseline"
    names.remove("avx2")
    assert cpu.about() == "active with baseline kernels"


def test_kernels_that_were_not_built_ask_for_a_compiler_and_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, ModuleNotFoundError("No module named 'troth._cpu'"))
    reason = cpu.unavailable()
    assert reason is not None
    assert "install a C++ compiler (Debian: apt install g++" in reason
    assert "several times slower" in reason
    assert not cpu.is_broken()


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (SimpleNamespace(INTERFACE=1), f"built from other sources (interface 1, not {cpu.INTERFACE})"),
        (ImportError("no GLIBC_2.99"), "built for another system and cannot be loaded (no GLIBC_2.99)"),
    ],
)
def test_kernels_that_cannot_be_used_ask_for_a_new_installation_and_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, found: Any, told: str
) -> None:
    installed(monkeypatch, found)
    reason = cpu.unavailable()
    assert reason is not None
    assert told in reason
    assert "install Troth again, with pip's --force-reinstall --no-deps" in reason
    assert cpu.is_broken()
