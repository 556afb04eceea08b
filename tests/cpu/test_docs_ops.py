"""docs/ops.md lists every op with its arguments, its tolerances and its providers, as ``ops/`` declares them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re

import pytest
import torch

import troth.ops
from tests.markdown import ROOT, Document, code, codes
from troth.ops import registry
from troth.ops.impl import cpu
from troth.ops.registry import OPS, PROVIDERS, Tolerance

for module in pkgutil.iter_modules(troth.ops.__path__):
    importlib.import_module(f"troth.ops.{module.name}")

DOCUMENT = Document.read("docs/ops.md")
SHAPES = DOCUMENT.section("Shapes")
DTYPES = ("float32", "bfloat16", "float16", "int64", "bool")
SUMMARY = {code(row["op"]): row for row in DOCUMENT.table("op", *DTYPES, "providers")}
DECLARED = sorted(OPS)
"""Before any test declares one of its own."""


def written_providers() -> set[tuple[str, str]]:
    """(op, provider) of every registration in ``ops/``, whether or not its provider can run on this machine."""
    return {
        (function.value.id, ast.literal_eval(call.args[0]))
        for path in (ROOT / "src/troth/ops").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(function := call.func, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.attr == "provider"
    }


def shown(tolerance: Tolerance | None) -> str:
    if tolerance is None:
        return ""
    if tolerance.absolute == tolerance.relative == 0.0:
        return "exact"
    return f"{tolerance.absolute:g} + {tolerance.relative:g}"


def test_ops_document_lists_every_op() -> None:
    assert list(SUMMARY) == DECLARED
    assert sorted(SHAPES.headings(3)) == DECLARED


@pytest.mark.parametrize("name", DECLARED)
def test_ops_document_gives_the_tolerances_of_an_op(name: str) -> None:
    declared = OPS[name].tolerances
    assert {str(dtype).removeprefix("torch.") for dtype in declared} <= {*DTYPES}
    expected = {dtype: shown(declared.get(getattr(torch, dtype))) for dtype in DTYPES}
    assert {dtype: SUMMARY[name][dtype] for dtype in DTYPES} == expected
    assert all(tolerance.reason for tolerance in declared.values())


@pytest.mark.parametrize("name", DECLARED)
def test_ops_document_gives_the_providers_of_an_op(name: str) -> None:
    listed = codes(SUMMARY[name]["providers"])
    assert sorted(listed) == sorted(provider for op, provider in written_providers() if op == name)
    assert OPS[name].implementations.keys() <= {*listed}
    order = [provider.name for provider in PROVIDERS]
    assert listed == sorted(listed, key=order.index), "the fastest comes first, as in ops/registry.py"


def test_ops_document_lists_the_providers_in_their_order() -> None:
    listed = [code(row["provider"]) for row in DOCUMENT.table("provider", "runs")]
    assert listed == [provider.name for provider in PROVIDERS]
    assert f"`--providers {registry.REFERENCE}`" in DOCUMENT.flat


def test_ops_document_lists_the_weights_that_the_cpu_provider_reads() -> None:
    dense = {str(dtype).removeprefix("torch.") for dtype in cpu.DENSE_FORMATS}
    assert dense == {"float32", "float16", "bfloat16"}
    text = DOCUMENT.flat
    sentence = text[text.index("as they lie in the file:") : text.index("in rows of a multiple")]
    assert codes(sentence) == ["F32", "F16", "BF16", *(kind.name for kind in cpu.FORMATS)]
    # Importing the module would register kernels that may not be built here.
    source = (ROOT / "src/troth/ops/impl/cpu_linear.py").read_text()
    (multiple,) = re.findall(r"^INPUTS_MULTIPLE: Final = (\d+)$", source, re.MULTILINE)
    assert f"in rows of a multiple of {multiple} values" in text


@pytest.mark.parametrize("name", DECLARED)
def test_ops_document_lists_the_arguments_of_an_op(name: str) -> None:
    rows = SHAPES.section(name).table("argument", "what")
    assert [code(row["argument"]) for row in rows] == list(inspect.signature(OPS[name].reference).parameters)
    assert all(row["what"] for row in rows)
