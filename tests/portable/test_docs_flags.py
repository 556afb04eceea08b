"""docs/flags.md says what ``cli/flags.py``, ``cli/commands.py``, ``config/`` and the exit codes say, all of it."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from tests.cli_engine import EngineOpener
from tests.markdown import ROOT, Document, Row, code, codes
from troth.cli import chat, exit_code, flags, session
from troth.cli.commands import COMMANDS
from troth.cli.flags import Flag, Group
from troth.cli.main import build_parser, main
from troth.config import env
from troth.config.options import EngineOptions, ModelOptions, ServeOptions
from troth.config.resolve import (
    CPU_CHUNK_TOKENS,
    CPU_MAX_ROWS,
    GPU_CHUNK_TOKENS,
    GPU_MAX_ROWS,
    GPU_STEP_TOKENS,
)
from troth.config.values import MAX_PORT
from troth.contracts.sampling import MAX_TEMPERATURE
from troth.text.defaults import FALLBACK_TEMPERATURE

DOCUMENT = Document.read("docs/flags.md")
FLAGS = DOCUMENT.section("Flags")
FLAG_COLUMNS = ("flag", "value", "default", "meaning")
OPTIONS = (ModelOptions(), EngineOptions(), ServeOptions())
UNITS = {"_s": "SECONDS", "_tokens": "tokens", "_bytes": "bytes", "max_rows": "requests", "max_waiting": "requests"}
ON_CPU_AND_GPU = {
    "max_rows": (CPU_MAX_ROWS, GPU_MAX_ROWS),
    "chunk_tokens": (CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS),
    "step_tokens": (CPU_CHUNK_TOKENS, GPU_STEP_TOKENS),
}


def groups() -> list[Group]:
    """Every group that a command takes, once."""
    taken = [flags.GENERAL, *(group for command in COMMANDS for group in command.groups)]
    return [group for i, group in enumerate(taken) if group not in taken[:i]]


def rows_of(group: Group) -> dict[str, Row]:
    """The rows of a group's table by all the names of their flag."""
    return {row["flag"]: row for row in FLAGS.section(group.title).table(*FLAG_COLUMNS)}


def written(flag: Flag) -> str:
    return " ".join(f"`{name}`" for name in flag.names)


def option_default(field: str) -> Any:
    """The default of an option; None where the machine or the model decides, or where it is no option."""
    value = next((getattr(one, field) for one in OPTIONS if hasattr(one, field)), None)
    return None if value == () else value


def test_flags_document_has_a_section_for_each_group_and_no_other() -> None:
    assert sorted(FLAGS.headings(3)) == sorted(group.title for group in groups())


@pytest.mark.parametrize("group", groups(), ids=lambda group: group.title)
def test_flags_document_lists_each_flag_of_a_group_with_its_value_and_default(group: Group) -> None:
    expected = {written(flag): flag for flag in group.flags}
    if group is flags.GENERAL:
        rows = rows_of(group)
        assert "`-h` `--help`" in rows
        del rows["`-h` `--help`"]
    else:
        rows = rows_of(group)
    assert list(rows) == list(expected), "docs/flags.md lists other flags than cli/flags.py"
    for names, flag in expected.items():
        row, default = rows[names], option_default(flag.field)
        assert row["meaning"], names
        if flag.read is None:
            assert (row["value"], row["default"]) == ("", "off"), names
            continue
        assert codes(row["value"]) == [flag.metavar], names
        if default is None:
            assert row["default"], names
        else:
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert row["default"] == f"`{shown}`", names
        assert ("may be repeated" in row["meaning"]) == flag.repeat, names


@pytest.mark.parametrize("group", groups(), ids=lambda group: group.title)
def test_flags_document_gives_units_where_the_field_has_one(group: Group) -> None:
    rows = rows_of(group)
    for flag in group.flags:
        for ending, unit in UNITS.items():
            if flag.read is not None and flag.field.endswith(ending):
                assert unit.lower() in rows[written(flag)]["value"].lower(), (flag.field, unit)


def test_flags_document_gives_the_defaults_of_both_kinds_of_device() -> None:
    cells = {flag.field: rows_of(flags.BATCH)[written(flag)]["default"] for flag in flags.BATCH.flags}
    steps = {row["option"]: row["default"] for row in DOCUMENT.table("option", "default", "meaning")}
    cells["step_tokens"] = steps["`EngineOptions.step_tokens`"]
    for field, (cpu, gpu) in ON_CPU_AND_GPU.items():
        assert cells[field].startswith(f"{cpu:,} on a CPU, {gpu:,} on a GPU"), field


def test_flags_document_gives_the_temperature_of_models_that_name_none() -> None:
    assert rows_of(flags.SAMPLING)["`--temperature`"]["default"] == f"the model's, else {FALLBACK_TEMPERATURE}"
    assert f"0 to {MAX_TEMPERATURE:g}" in rows_of(flags.SAMPLING)["`--temperature`"]["meaning"]
    assert f"gets {FALLBACK_TEMPERATURE}." in FLAGS.section("sampling").flat


def test_flags_document_lists_the_commands_with_what_they_take() -> None:
    rows = DOCUMENT.table("command", "what it does", "takes", "flags")
    assert [code(row["command"]) for row in rows] == [f"troth {command.name}" for command in COMMANDS]
    for row, command in zip(rows, COMMANDS, strict=True):
        assert codes(row["takes"]) == ([command.operand.metavar] if command.operand else [])
        titles = [group.title for group in (*command.groups, flags.GENERAL)]
        assert row["flags"].split(", ") == titles, command.name


def test_flags_document_lists_each_variable_with_its_flag() -> None:
    rows = DOCUMENT.table("variable", "flag", "value")
    listed = [(code(row["variable"]), code(row["flag"])) for row in rows]
    every = [flag for group in groups() for flag in group.flags]
    expected = [(one.name, next(flag.names[-1] for flag in every if flag.field == one.field)) for one in env.VARIABLES]
    assert listed == expected
    assert {code(row["variable"]): row["value"] for row in rows}["TROTH_PORT"] == f"0 to {MAX_PORT}"


def test_flags_document_lists_every_other_variable_that_the_package_reads() -> None:
    """Wherever a mapping called environ is asked for a name, that name is in one of the two tables."""
    asked = {
        node.args[0].value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).rpartition(".")[0].endswith("environ")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    listed = {code(row["variable"]) for row in DOCUMENT.table("variable", "what it says")}
    assert asked == listed


def test_flags_document_lists_the_options_that_no_flag_sets() -> None:
    settable = {flag.field for group in groups() for flag in group.flags}
    expected = {
        f"{type(options).__name__}.{field}": getattr(options, field)
        for options in OPTIONS
        for field in options.__dataclass_fields__
        if field not in settable
    }
    rows = {code(row["option"]): row["default"] for row in DOCUMENT.table("option", "default", "meaning")}
    assert list(rows) == list(expected)
    for name, default in expected.items():
        if default is not None:
            assert rows[name] == f"`{default:g}`" if isinstance(default, float) else f"`{default}`", name


def test_flags_document_lists_the_exit_codes() -> None:
    codes_listed = [int(code(row["code"])) for row in DOCUMENT.table("code", "meaning")]
    assert codes_listed == sorted(value for name, value in vars(exit_code).items() if name.isupper())


def test_flags_document_lists_the_lines_that_chat_obeys() -> None:
    listed = [code(row["line"]) for row in FLAGS.section("chat").table("line", "meaning")]
    assert listed == [line[:14].strip() for line in chat.HELP.splitlines() if line.startswith("/")]


def test_flags_document_shows_the_json_that_run_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "open_engine", EngineOpener("Paris."))
    assert main(["run", "--json", "-q", "Hi"]) == 0
    (shown,) = DOCUMENT.fences("json")
    assert shape(json.loads(shown.text)) == shape(json.loads(capsys.readouterr().out))


def shape(value: Any) -> Any:
    """A JSON value without its values."""
    return {name: shape(one) for name, one in value.items()} if isinstance(value, dict) else type(value).__name__


def test_flags_document_says_that_flags_are_written_in_full() -> None:
    """The sentence would be wrong if the parser took abbreviations."""
    assert "`--max-tok`" in DOCUMENT.flat
    assert main(["run", "--max-tok", "3", "Hi"]) == exit_code.USER_ERROR
    assert build_parser().parse_args(["run", "--max-tokens", "3", "Hi"]).max_tokens == 3
