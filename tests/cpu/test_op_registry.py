"""The one door to ops: declaration, registration, order of providers, fallbacks, and errors that name what to do."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import troth.ops
from tests.cpu.op_cases import inputs, packed_arguments
from troth.errors import OptionError
from troth.ops import registry
from troth.ops.registry import OPS, Op, Provider, Tolerance

for module in pkgutil.iter_modules(troth.ops.__path__):
    importlib.import_module(f"troth.ops.{module.name}")

EXACT = {torch.float32: Tolerance(0.0, 0.0, "a test")}
DECLARED = sorted(OPS)
"""Before any test declares one of its own."""


@pytest.fixture
def doubled() -> Iterator[Op[[int], str]]:
    """An op of the real registry, taken out again; it tells who ran."""

    @registry.op(tolerances=EXACT, grid=tuple)
    def doubled_for_tests(value: int) -> str:
        """Say who doubled it."""
        return f"reference {2 * value}"

    yield doubled_for_tests
    del OPS["doubled_for_tests"]


@pytest.fixture
def restored() -> Iterator[None]:
    """The order of providers as it was."""
    yield
    registry.activate()


def register(op: Op[[int], str], name: str, **options: Any) -> None:
    @op.provider(name, **options)
    def run(value: int) -> str:
        return f"{name} {2 * value}"


def test_op_without_providers_runs_its_reference_and_counts_nothing(doubled: Op[[int], str]) -> None:
    assert doubled(4) == "reference 8"
    assert doubled.num_fallbacks == 0
    assert (doubled.name, doubled.__doc__) == ("doubled_for_tests", "Say who doubled it.")


def test_op_declared_twice_is_refused(doubled: Op[[int], str]) -> None:
    with pytest.raises(TypeError, match="doubled_for_tests is declared twice"):
        registry.op(tolerances=EXACT, grid=tuple)(doubled.reference)


def test_op_runs_the_first_active_provider_that_supports_the_call(doubled: Op[[int], str]) -> None:
    register(doubled, "slow")
    register(doubled, "fast", supports=lambda value: value < 10)
    doubled.activate(("fast", "absent", "slow"))
    assert doubled.active == ("fast", "slow")
    assert [doubled(3), doubled(30)] == ["fast 6", "slow 60"]
    assert doubled.num_fallbacks == 0
    doubled.activate(("slow", "fast"))
    assert doubled(3) == "slow 6"


def test_op_counts_calls_that_fell_back_to_the_reference(doubled: Op[[int], str]) -> None:
    register(doubled, "fast", supports=lambda value: value < 10)
    doubled.activate(("fast",))
    assert [doubled(1), doubled(10), doubled(11)] == ["fast 2", "reference 20", "reference 22"]
    assert doubled.num_fallbacks == 2
    told = "doubled_for_tests ran its reference 2 times: none of fast takes such arguments"
    assert told in registry.fallbacks()


def test_provider_of_another_signature_is_refused(doubled: Op[[int], str]) -> None:
    def other_name(number: int) -> str:
        return str(number)

    def other_default(value: int = 0) -> str:
        return str(value)

    for run in (other_name, other_default):
        with pytest.raises(TypeError, match="doubled_for_tests: provider fast takes"):
            doubled.provider("fast")(run)
    assert not doubled.implementations


@pytest.mark.parametrize("name", ["fast", "reference"])
def test_provider_registered_twice_or_as_the_reference_is_refused(doubled: Op[[int], str], name: str) -> None:
    register(doubled, "fast")
    with pytest.raises(TypeError, match=f"provider {name} is registered already"):
        register(doubled, name)


@pytest.mark.usefixtures("restored")
def test_activate_runs_references_alone_when_asked_to() -> None:
    status = registry.activate(("reference",))[-1]
    assert all(op.active == () for op in OPS.values())
    assert (status.name, status.active, status.reason, status.ops) == ("torch", False, "not asked for", ())


@pytest.mark.usefixtures("restored")
def test_activate_without_an_order_takes_every_available_provider() -> None:
    registry.activate(("reference",))
    by_name = {status.name: status for status in registry.activate()}
    assert by_name["torch"].active
    assert "attention" in by_name["torch"].ops


@pytest.mark.usefixtures("restored")
def test_activate_leaves_out_a_provider_that_is_not_for_every_day_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rare = Provider("rare", (), lambda: None, by_default=False)
    monkeypatch.setattr(registry, "PROVIDERS", (rare, *registry.PROVIDERS))
    assert "rare" not in registry.default_order()
    assert {status.name: status.reason for status in registry.activate()}["rare"] == "not asked for"
    assert {status.name: status.active for status in registry.activate(("rare", "torch"))}["rare"]


@pytest.mark.usefixtures("restored")
def test_activate_refuses_an_unknown_provider_by_name_and_changes_nothing() -> None:
    before = {name: op.active for name, op in OPS.items()}
    with pytest.raises(OptionError, match=r"unknown op provider 'tproch'; known: .*torch.*, reference"):
        registry.activate(("tproch",))
    assert {name: op.active for name, op in OPS.items()} == before


@pytest.mark.usefixtures("restored")
def test_activate_refuses_a_provider_that_cannot_run_here_only_when_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = Provider("absent", ("no_such_module",), lambda: "it needs a device that is not here")
    monkeypatch.setattr(registry, "PROVIDERS", (absent, *registry.PROVIDERS))
    with pytest.raises(OptionError, match="'absent' cannot run here: it needs a device that is not here"):
        registry.activate(("absent", "torch"))
    by_name = {status.name: status for status in registry.activate()}
    assert (by_name["absent"].active, by_name["absent"].reason) == (False, "it needs a device that is not here")
    assert by_name["torch"].active


@pytest.mark.parametrize("name", DECLARED)
def test_op_states_what_it_computes_and_why_its_tolerances_are_what_they_are(name: str) -> None:
    declared = OPS[name]
    assert declared.__doc__
    assert declared.tolerances
    for tolerance in declared.tolerances.values():
        assert tolerance.reason
        assert tolerance.absolute >= 0
        assert tolerance.relative >= 0


@pytest.mark.parametrize("tolerance", [Tolerance(0.5, 0.0, ""), Tolerance(0.0, 0.25, "")], ids=["absolute", "relative"])
def test_tolerance_holds_up_to_its_bound_and_never_for_nan(tolerance: Tolerance) -> None:
    got = torch.tensor([2.5, 1.5, 2.51, 1.49, torch.nan, torch.inf])
    want = torch.tensor([2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert tolerance.holds(got, want).tolist() == [True, True, False, False, False, False]
    assert not tolerance.holds(torch.tensor(torch.nan), torch.tensor(torch.nan))


@pytest.mark.parametrize("name", DECLARED)
def test_op_grid_names_cases_for_tests_and_for_benchmarks_apart(name: str) -> None:
    cases = list(OPS[name].grid())
    assert len({case.name for case in cases}) == len(cases)
    assert {case.timed for case in cases} == {False, True}


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_op_reference_computes_every_case_of_its_grid(name: str) -> None:
    op = OPS[name]
    for case in op.grid():
        if not case.timed:
            arguments = case.make(inputs())
            results = op.reference(*arguments)
            # An op without a result changes its first argument.
            assert is_filled(arguments[0] if results is None else results), case.name


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_op_computes_the_cases_that_benchmarks_time(name: str) -> None:
    op = OPS[name]
    for case in op.grid():
        if case.timed:
            arguments = packed_arguments(case.make(inputs()), torch.float32)
            results = op(*arguments)
            assert is_filled(arguments[0] if results is None else results), case.name


@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.implementations))
def test_op_with_providers_has_a_test_that_compares_them(name: str) -> None:
    compared = [path for path in Path(__file__).parent.glob("test_op_*.py") if f"providers({name})" in path.read_text()]
    assert compared, f"no tests/cpu/test_op_*.py runs the providers of {name}"


def is_filled(results: Any) -> bool:
    """Whether every value was written: new memory is NaN."""
    tensors = results if isinstance(results, tuple) else (results,)
    return not any(bool(tensor.isnan().any()) for tensor in tensors)
