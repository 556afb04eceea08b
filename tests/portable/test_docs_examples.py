"""The examples in the documents: commands that exist, requests that are answered, Python that runs without a model.

Python that needs the demo model runs in ``tests/e2e/test_docs.py``.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.cli_engine import EngineOpener
from tests.markdown import ROOT, Document, Fence, codes, documents
from tests.portable.serving import asking
from troth.artifact.resolve import DEMO_PACKAGE
from troth.cli import flags
from troth.cli.commands import COMMANDS
from troth.cli.flags import Group
from troth.cli.main import build_parser
from troth.config import env
from troth.contracts.sampling import SamplingParams
from troth.text.chat_terms import TERMS

NO_MODEL = "troth.testing"
"""Python that imports this needs no model."""
OTHER_PROGRAMS = {"echo", "git", "cd", "export", "source", "."}


def fences(*languages: str) -> Iterator[tuple[Document, Fence]]:
    for name in documents():
        document = Document.read(name)
        for fence in document.fences(*languages):
            yield document, fence


def commands() -> list[object]:
    """Every command line of every shell block, pipes taken apart."""
    lines = [
        (f"{document.path.name}:{fence.line}", command.strip())
        for document, fence in fences("sh", "bash", "shell", "console")
        for line in fence.text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
        for command in re.split(r" \| | && ", line.partition("  #")[0])
    ]
    return [pytest.param(command, id=f"{place} {command[:40]}") for place, command in lines]


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables set in front of a command, and its words."""
    words = shlex.split(command)
    variables: dict[str, str] = {}
    while words and (match := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
        variables[match[1]] = match[2]
        del words[0]
    return variables, words


@pytest.mark.parametrize("command", commands())
def test_command_in_a_document_exists(command: str) -> None:
    variables, words = words_of(command)
    assert {name for name in variables if name.startswith(env.PREFIX)} <= {one.name for one in env.VARIABLES}
    program, *arguments = words
    match program.removeprefix(".venv/bin/"):
        case "troth" if arguments != ["--version"]:
            assert build_parser().parse_args(arguments).command == next(a for a in arguments if a[0] != "-")
        case "troth":
            pass
        case "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert arguments
            assert set(arguments) <= set(targets)
        case "curl":
            answer_to_curl(arguments)
        case "pip":
            assert arguments[0] == "install"
            allowed = {"-e", "--no-deps", ".", ".[dev]", "openai", DEMO_PACKAGE.replace("_", "-")}
            assert set(arguments[1:]) <= allowed
        case "python" | "python3":
            assert arguments[0] == "-m"
            module = ROOT / arguments[1].replace(".", "/")
            assert arguments[1] == "venv" or module.is_dir() or module.with_suffix(".py").exists()
        case other:
            assert other in OTHER_PROGRAMS, f"{other}: say in this test how to check it"


def answer_to_curl(arguments: list[str]) -> None:
    """Send what curl would to a server without a model, and expect an answer."""
    (url,) = [one for one in arguments if one.startswith(("http://", "localhost"))]
    parts = urlsplit(url if "://" in url else f"http://{url}")
    headers = [arguments[i + 1].split(": ", 1) for i, one in enumerate(arguments) if one in ("-H", "--header")]
    bodies = [arguments[i + 1] for i, one in enumerate(arguments) if one in ("-d", "--data")]
    with asking() as client:
        if bodies:
            fields = json.loads(bodies[0])
            fields.pop("model", None)
            response = client.post(parts.path, json=fields, headers=dict(headers))
        else:
            response = client.get(parts.path, headers=dict(headers))
    assert response.status_code == 200, response.text


def test_quickstart_lists_the_options_of_an_answer() -> None:
    text = Document.read("docs/quickstart.md").section("Python").flat
    sentence = text[text.index("Options of `chat`") : text.index("and every field of")]
    names = [name for name in re.findall(r"`(\w+)`", sentence) if name not in ("chat", "complete")]
    example = {
        "max_tokens": 3,
        "stop": "x",
        "response_format": {"type": "text"},
        "grammar": None,
        "ignore_eos": True,
        "priority": 1,
        "prompt_cache": False,
    }
    assert names == [*TERMS, *example]
    opener = EngineOpener()
    engine = opener(None, None, lambda *progress: None)
    engine.chat("hi", **example)
    (request,) = opener.thread.requests
    taken = (request.max_tokens, request.stop, request.eos_ids, request.priority, request.prompt_cache)
    assert taken == (3, ("x",), frozenset(), 1, False)
    shown = re.findall(r"`(\w+)`", text[text.index("SamplingParams`") : text.index("and so on)")])
    assert {*shown} <= SamplingParams.__dataclass_fields__.keys()


def python_examples() -> list[object]:
    return [
        pytest.param(document, fence, id=f"{document.path.name}:{fence.line}") for document, fence in fences("python")
    ]


@pytest.mark.parametrize(("document", "fence"), python_examples())
def test_python_in_a_document_is_a_whole_program(
    document: Document, fence: Fence, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = ast.parse(fence.text)
    assert any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)
    if NO_MODEL in fence.text:
        exec(compile(tree, f"{document.path.name}:{fence.line}", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out == document.output_of(fence)


@pytest.mark.parametrize("name", documents())
def test_flag_named_in_a_document_exists(name: str) -> None:
    known = {flag for group in every_group() for one in group.flags for flag in one.names}
    named = {word for text in codes(prose(Document.read(name))) for word in text.split() if re.match("--[a-z]", word)}
    assert named - known - {"--version", "--help", "--max-tok"} == set()


def every_group() -> list[Group]:
    return [flags.GENERAL, *(group for command in COMMANDS for group in command.groups)]


def prose(document: Document) -> str:
    """A document without its fenced blocks, each paragraph on a line."""
    fenced = re.sub(r"^```.*?^```$", "", document.text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!\n)\n(?!\n|\|)", " ", fenced)


@pytest.mark.parametrize("name", documents())
def test_link_in_a_document_leads_to_a_file(name: str) -> None:
    document = Document.read(name)
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.text)
    broken = [link for link in links if "://" not in link and not (document.path.parent / link).exists()]
    assert broken == []
