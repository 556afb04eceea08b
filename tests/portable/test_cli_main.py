"""The command line as a whole: help that costs nothing, flags that are frozen, errors in one line."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from troth.cli import commands, flags
from troth.cli.commands import COMMANDS, Command
from troth.cli.main import build_parser, main
from troth.config import env
from troth.config.options import EngineOptions, ModelOptions, ServeOptions
from troth.contracts.sampling import SamplingParams
from troth.errors import (
    Busy,
    ContextExceeded,
    DeviceError,
    ModelLoadError,
    OptionError,
    OutOfMemory,
    RequestError,
    TrothError,
)
from troth.text.chat_terms import TERMS

GENERAL = ["--debug", "--help", "-h"]
SAMPLING = ["--max-tokens", "--min-p", "--seed", "--stop", "--temperature", "--top-k", "--top-p"]
MODEL = [
    "--context",
    "--deterministic",
    "--device",
    "--dtype",
    "--kv-dtype",
    "--model",
    "--providers",
    "--threads",
    "--weights",
    "--inputs",
    "-m",
]
DISK_CACHE = ["--disk-cache", "--disk-cache-size"]
BATCH = ["--chunk-tokens", "--kv-memory", "--rows"]
SPECULATION = ["--draft-model", "--speculate", "--speculate-uncertified"]
TEMPLATE = ["--chat-template"]
THINKING = ["--thinking", "--no-thinking", "--reasoning-budget"]
SERVE = [
    "--alias",
    "--api-key",
    "--cors-origin",
    "--host",
    "--keepalive",
    "--max-streams",
    "--name",
    "--port",
    "--queue",
    "--request-timeout",
    "--warm",
]
FROZEN = {
    "run": [
        *(*GENERAL, *SAMPLING, *THINKING, *SPECULATION, *MODEL, *TEMPLATE),
        *("--json", "--quiet", "--raw", "--system", "-q"),
    ],
    "chat": [*GENERAL, *SAMPLING, *THINKING, *MODEL, *TEMPLATE, "--system"],
    "serve": [*GENERAL, *SERVE, *BATCH, *SPECULATION, *DISK_CACHE, *MODEL, *TEMPLATE],
    "models": [*GENERAL, "--json"],
    "fit": [*GENERAL, *MODEL, *BATCH, *SPECULATION, *DISK_CACHE, "--json"],
    "probe": [*GENERAL, *MODEL, *TEMPLATE, "--json"],
    "certify": [*GENERAL, *MODEL, *TEMPLATE, "--json"],
    "bench": [
        *(*GENERAL, *SPECULATION, *BATCH, *MODEL, *TEMPLATE),
        *("--json", "--prompt-tokens", "--repetitions", "--tokens"),
    ],
    "cache": [*GENERAL, *MODEL, "--disk-cache", "--json"],
    "doctor": [*GENERAL, "--json"],
}
"""A flag is a promise: adding, renaming or removing one is a decision, and is made here too."""

HEAVY = ("torch", "numpy", "tokenizers", "rich", "starlette", "uvicorn", "msgspec", "zmq", "jinja2", "gguf", "asyncio")
ASK_FOR_HELP = """
import sys, time
from troth.cli.main import main
code = main(sys.argv[1:])
print(code, time.process_time(), *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def parsers() -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = action.choices
    return found


def flag_names(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(name for action in parser._actions for name in action.option_strings)


@pytest.mark.parametrize("command", [None, *FROZEN])
def test_help_loads_nothing_heavy(command: str | None, record_property: Callable[[str, object], None]) -> None:
    """Help must answer in under 0.3 s; the CPU time is recorded, and what would take the time is not loaded."""
    arguments = [command, "--help"] if command else ["--help"]
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ASK_FOR_HELP, *arguments], capture_output=True, text=True, check=True)
    code, cpu_s, *modules = done.stderr.split()
    record_property("wall_s", round(time.monotonic() - started, 3))
    record_property("cpu_s", float(cpu_s))
    assert code == "0"
    assert done.stdout.startswith("usage: troth")
    assert not set(HEAVY) & set(modules)


def test_flags_are_the_frozen_ones_for_every_command() -> None:
    assert {name: flag_names(parser) for name, parser in parsers().items()} == {
        name: sorted(names) for name, names in FROZEN.items()
    }
    assert flag_names(build_parser()) == [*GENERAL[:2], "--version", GENERAL[2]]


def test_serve_has_at_most_32_flags() -> None:
    """25, ``--warm`` (what to compute first has a file, which no other flag could name), ``--deterministic``,
    ``--speculate``, ``--speculate-uncertified`` (what goes against a rule is said in words of its own),
    ``--draft-model`` (a second path, which no list of sources could hold), ``--weights`` (what is rounded when a
    model is loaded is neither its arithmetic nor its cache) and ``--inputs`` (nor is what weights meet).
    """
    actions = [action for action in parsers()["serve"]._actions if action.option_strings]
    assert len(actions) <= 32


def test_flags_set_fields_that_exist() -> None:
    own = {flag.field for group in (flags.RUN, flags.BENCH, flags.JSON, flags.GENERAL) for flag in group.flags}
    options = {field for cls in (ModelOptions, EngineOptions, ServeOptions) for field in cls.__dataclass_fields__}
    sampling = {*SamplingParams.__dataclass_fields__, "max_tokens", "stop"}
    for group in (flags.MODEL, flags.TEMPLATE, flags.BATCH, flags.SPECULATION, flags.DISK_CACHE, flags.SERVE):
        assert {flag.field for flag in group.flags} <= options, group.title
    assert {flag.field for flag in flags.SAMPLING.flags} <= sampling
    thinking = {flag.field for flag in flags.THINKING.flags}
    assert not own & (options | sampling | thinking)
    assert thinking - {"no_thinking"} <= set(TERMS)


def test_help_names_every_command_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n    {command.name} " in text and command.summary in text for command in COMMANDS)
    assert all(variable.name in text for variable in env.VARIABLES)


def test_help_shows_defaults_from_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--host ADDRESS address to listen on (default: 127.0.0.1)" in text
    assert "--port PORT port to listen on; 0 takes a free one (default: 8080)" in text
    assert "-m, --model PATH folder" in text


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "troth 0.1.0\n"


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["rnu"], 2)])
def test_package_runs_as_the_script_does(arguments: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-m", "troth", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "" if code else "troth 0.1.0\n")
    assert done.stderr.startswith("troth: COMMAND: invalid choice" if code else "")


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.partition("\n")[0]) == ("", "usage: troth COMMAND [flags]")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rnu"], "invalid choice: 'rnu'"),
        (["run", "--tempo", "1"], "unknown here: --tempo (see troth run --help)"),
        (["run", "--temp", "Hi"], "unknown here: --temp, did you mean --temperature? (see troth run --help)"),
        (["run", "--max-tok", "3", "hi"], "unknown here: --max-tok, did you mean --max-tokens? (see troth run --help)"),
        (["run", "--max-tok=3", "hi"], "unknown here: --max-tok, did you mean --max-tokens? (see troth run --help)"),
        (["run", "--sed", "3", "-x"], "unknown here: --sed, did you mean --seed?; -x (see troth run --help)"),
        (["--verison"], "unknown here: --verison, did you mean --version? (see troth --help)"),
        (["run", "two", "words"], "one argument too many: 'words'; what has spaces stands in quotes (see troth run"),
        (["run", "--top-k"], "--top-k: expected one argument"),
        (["run", "--top-k", "1.5", "Hi"], "--top-k: must be a whole number of at least 0, not '1.5'"),
        (["run", "--seed", "-1", "Hi"], "--seed: must be a whole number from 0 to 18446744073709551615, not '-1'"),
        (["run", "--temperature", "nan", "Hi"], "--temperature: must be a number, not 'nan'"),
        (["run", "--min-p", "low", "Hi"], "--min-p: must be a number, not 'low'"),
        (["serve", "--port", "70000"], "--port: must be a whole number from 0 to 65535, not '70000'"),
        (["serve", "--dtype", "int3"], "--dtype: must be one of float32, bfloat16, float16, not 'int3'"),
        (["serve", "--alias", "x"], "--alias: must be REQUESTED=SERVED, not 'x'"),
        (["serve", "--kv-memory", "lots"], "--kv-memory: must be a size such as 512M or 4G, not 'lots'"),
        (["serve", "--keepalive", "0"], "--keepalive: must be a number of seconds above 0, not '0'"),
        (["serve", "--context", "15"], "--context: must be a whole number of at least 16, not '15'"),
        (["serve", "--rows", "0"], "--rows: must be a whole number of at least 1, not '0'"),
        (["serve", "--providers", "a,,b"], "--providers: must be words between commas, not 'a,,b'"),
        (["fit", "a", "--model", "b"], "two models are named, 'a' and --model 'b'; name one"),
    ],
)
def test_wrong_usage_is_told_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("troth: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OptionError("no such option"), 2, "troth: no such option\n"),
        (ModelLoadError("is damaged", path="a.gguf"), 2, "troth: a.gguf: is damaged\n"),
        (RequestError("bad request", param="x"), 2, "troth: bad request\n"),
        (ContextExceeded(num_prompt_tokens=9, max_tokens=1, limit=5), 2, "troth: This model's maximum context length"),
        (Busy("full"), 1, "troth: full\n"),
        (DeviceError("broken"), 1, "troth: broken\n"),
        (OutOfMemory("no room", wanted_bytes=2, free_bytes=1), 1, "troth: no room: wanted 2 bytes, free 1 bytes\n"),
        (TrothError("other"), 1, "troth: other\n"),
        (ValueError("a bug"), 1, "troth: ValueError: a bug (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, told: str
) -> None:
    fail_with(monkeypatch, error)
    assert main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(told)
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["--debug", "doctor"], ["doctor", "--debug"]])
@pytest.mark.parametrize("error", [OptionError("no"), ValueError("no")])
def test_debug_shows_where_an_error_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, arguments: list[str]
) -> None:
    fail_with(monkeypatch, error)
    assert main(arguments) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith(f"troth: {'ValueError: ' if isinstance(error, ValueError) else ''}no\n")


def test_commands_are_loaded_from_modules_of_their_names() -> None:
    for command in COMMANDS:
        assert command.load().__module__ == f"troth.cli.{command.name}"


def test_cli_does_not_import_torch() -> None:
    code = "import sys, troth.cli.main as m\nfor command in m.COMMANDS: command.load()\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "troth.cli.serve" in modules
    assert "torch" not in modules


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def load(command: Command) -> Callable[..., Any]:
        def run(*arguments: object) -> int:
            raise error

        return run

    monkeypatch.setattr(commands.Command, "load", load)
