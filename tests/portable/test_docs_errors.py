"""docs/errors.md says what ``errors.py``, ``serve/errors.py`` and the command line make of every error."""

from __future__ import annotations

import ast
import inspect
import json
import re
from typing import Any

import pytest

from tests.markdown import ROOT, Document, Row, code, codes
from tests.portable.serving import CHAT, asking, error_of, hello
from troth import errors
from troth.cli.commands import Command
from troth.cli.exit_code import FAILED, USER_ERROR
from troth.cli.main import main
from troth.config.options import EngineOptions
from troth.errors import ModelLoadError, OptionError, RequestError, TrothError
from troth.serve.errors import error_response

DOCUMENT = Document.read("docs/errors.md")
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "ContextExceeded": ((), {"num_prompt_tokens": 9, "max_tokens": 2, "limit": 10}),
    "CapabilityUnavailable": (("chat", "no template"), {}),
    "UnknownModel": (("gpt", ("fake",)), {}),
    "Cancelled": (("requested",), {}),
    "OutOfMemory": (("no room",), {"wanted_bytes": 2, "free_bytes": 1}),
}
RESPONSES = DOCUMENT.table("class", "status", "type", "code", "retry")


def tree() -> list[type[TrothError]]:
    """Every class of the tree, in the order of the module."""
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, TrothError)]
    return sorted(found, key=lambda cls: inspect.getsourcelines(cls)[1])


def example(name: str) -> TrothError:
    arguments, named = ARGUMENTS.get(name, (("it broke",), {}))
    error: TrothError = getattr(errors, name)(*arguments, **named)
    return error


def test_errors_document_draws_the_tree_as_it_is() -> None:
    drawing = DOCUMENT.fences("text")[0].text
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in drawing.splitlines():
        depth, name = (len(line) - len(line.lstrip("│├└─ "))) // 4, line.lstrip("│├└─ ")
        above[depth:] = [name]
        parents[name] = above[depth - 1] if depth else "Exception"
    assert parents == {cls.__name__: cls.__base__.__name__ for cls in tree() if cls.__base__}


def test_errors_document_lists_every_class_with_what_to_do() -> None:
    rows = DOCUMENT.table("class", "who acts", "what to do", "carries")
    assert sorted(code(row["class"]) for row in rows) == sorted(cls.__name__ for cls in tree())
    for row in rows:
        assert row["who acts"] in ("the user", "the caller", "nobody", "us", "the machine")
        assert len(row["what to do"]) > 10
        assert set(codes(row["carries"])) == set(vars(example(code(row["class"])))), row["class"]


def test_errors_document_maps_every_class_to_http() -> None:
    assert sorted(code(row["class"]) for row in RESPONSES) == sorted(cls.__name__ for cls in tree())


@pytest.mark.parametrize("row", RESPONSES, ids=[code(row["class"]) for row in RESPONSES])
def test_errors_document_gives_the_response_of_a_class(row: Row) -> None:
    response = error_response(example(code(row["class"])))
    error = json.loads(bytes(response.body))["error"]
    assert (response.status_code, error["type"]) == (int(row["status"]), code(row["type"]))
    assert row["code"] in ("its own", f"`{error['code']}`")
    assert (row["code"] == "its own") == (row["class"] == "`RequestError`")
    retry = [
        f"{shown}: {response.headers[name]}"
        for name, shown in (("retry-after", "Retry-After"), ("x-should-retry", "x-should-retry"))
        if name in response.headers
    ]
    assert codes(row["retry"]) == retry


def test_errors_document_shows_an_error_as_it_is() -> None:
    (shown,) = DOCUMENT.fences("json")
    with asking() as client:
        response = client.post(CHAT, json=hello(temperature="hot"))
    assert json.loads(shown.text) == {"error": error_of(response)}


def codes_in(tree: ast.AST, functions: set[str]) -> set[str]:
    """The literal ``code`` arguments in calls of these functions."""
    return {
        str(keyword.value.value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in functions
        for keyword in call.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
    }


def test_errors_document_lists_every_code_of_a_request_error() -> None:
    sources = [ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")]
    used = set().union(*(codes_in(source, {"RequestError"}) for source in sources))
    # The classes below RequestError hand their codes to it.
    used |= codes_in(ast.parse(inspect.getsource(errors)), {"super().__init__"})
    default = inspect.signature(RequestError).parameters["code"].default
    assert {code(row["code"]) for row in DOCUMENT.table("code", "meaning")} == used | {default}


def test_errors_document_lists_every_reason_of_a_cancellation() -> None:
    (sentence,) = re.findall(r"`Cancelled.reason` is ([^.]+)\.", DOCUMENT.section("Classes").flat)
    promised = re.search(r"``reason``: (.+?)\.$", inspect.getdoc(errors.Cancelled) or "", re.MULTILINE)
    assert promised
    assert codes(sentence) == re.split(r", | or ", promised[1])
    assert f"(nobody read the stream for {EngineOptions().consumer_idle_s:g} s)" in sentence


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_errors_document_gives_the_exit_code(cls: type[TrothError], monkeypatch: pytest.MonkeyPatch) -> None:
    users = (OptionError, ModelLoadError, RequestError)
    sentence = (
        f"{USER_ERROR} for `OptionError`, `ModelLoadError` and `RequestError` with what is below it, {FAILED} for"
    )
    assert sentence in DOCUMENT.section("Command line").flat

    def fails(*arguments: Any) -> int:
        raise example(cls.__name__)

    monkeypatch.setattr(Command, "load", lambda self: fails)
    assert main(["doctor"]) == (USER_ERROR if issubclass(cls, users) else FAILED)
