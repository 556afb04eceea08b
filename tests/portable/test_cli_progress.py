"""The progress bar: only where a person reads, only when it takes long, and gone without a trace."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from tests.cli_engine import Person
from troth import compose
from troth.cli import doctor
from troth.cli import progress as progress_module
from troth.cli.main import main
from troth.cli.progress import Progress
from troth.cli.terminal import Terminal
from troth.errors import OptionError


@pytest.fixture(autouse=True)
def _terminal_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def wait_for(text: str, stream: io.StringIO) -> None:
    for _ in range(500):
        if text in stream.getvalue():
            return
        time.sleep(0.01)
    raise AssertionError(f"{text!r} is not in {stream.getvalue()!r}")


def test_progress_shows_stage_and_share_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "DELAY_S", 0.0)
    errors = Person()
    with Progress(Terminal(io.StringIO(), io.StringIO(), errors), "starting") as progress:
        wait_for("starting", errors)
        progress("reading weights", 25, 100)
        wait_for("reading weights", errors)
        wait_for("25%", errors)
    shown = errors.getvalue()
    assert shown.endswith("\x1b[2K"), "the bar is erased"
    progress("too late", 1, 1)
    assert errors.getvalue() == shown
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_progress_shows_nothing_when_it_is_quick() -> None:
    errors = Person()
    with Progress(Terminal(io.StringIO(), io.StringIO(), errors), "starting") as progress:
        progress("reading weights", 1, 2)
    assert errors.getvalue() == ""


@pytest.mark.parametrize("errors", [io.StringIO(), Person()])
def test_progress_shows_nothing_where_nobody_wants_it(monkeypatch: pytest.MonkeyPatch, errors: io.StringIO) -> None:
    monkeypatch.setattr(progress_module, "DELAY_S", 0.0)
    monkeypatch.setattr(progress_module, "PLAIN_DELAY_S", 0.0)
    with Progress(Terminal(io.StringIO(), io.StringIO(), errors), "starting", quiet=True) as progress:
        progress("reading weights", 1, 2)
        time.sleep(0.05)
    assert errors.getvalue() == ""


def test_progress_is_a_line_per_stage_where_no_person_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever read a log saw nothing for as long as a model loaded."""
    monkeypatch.setattr(progress_module, "PLAIN_DELAY_S", 0.0)
    out, errors = io.StringIO(), io.StringIO()
    with Progress(Terminal(io.StringIO(), out, errors), "starting") as progress:
        wait_for("Starting ...\n", errors)
        for done in range(3):
            progress("reading weights", done, 2)
        progress("warming up", 0, 2)
    progress("too late", 1, 1)
    assert errors.getvalue() == "Starting ...\nReading weights ...\nWarming up ...\n"
    assert out.getvalue() == ""


def test_progress_in_lines_says_nothing_when_it_is_quick() -> None:
    errors = io.StringIO()
    with Progress(Terminal(io.StringIO(), io.StringIO(), errors), "starting") as progress:
        progress("reading weights", 1, 2)
    assert errors.getvalue() == ""


def test_progress_in_lines_does_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_DELAY_S", 0.0)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as gone:
        progress = Progress(Terminal(io.StringIO(), io.StringIO(), gone), "starting")
        progress._tell()
        progress("reading weights", 1, 2)
        with pytest.raises(BrokenPipeError):
            gone.flush()
        with suppress(BrokenPipeError):
            gone.close()


@pytest.mark.parametrize(("command", "line"), [("doctor", "Looking at this machine ...\n"), ("fit", "Planning ...\n")])
def test_commands_without_an_engine_tell_their_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, line: str
) -> None:
    """Both import torch, which takes seconds."""

    def slow(*arguments: object) -> None:
        time.sleep(0.2)
        raise OptionError("enough")

    monkeypatch.setattr(progress_module, "PLAIN_DELAY_S", 0.0)
    monkeypatch.setattr(doctor, "examine", slow)
    monkeypatch.setattr(compose, "find", lambda options: None)
    monkeypatch.setattr(compose, "plan", slow)
    assert main([command]) == 2
    assert capsys.readouterr() == ("", f"{line}troth: enough\n")


def test_progress_is_not_started_after_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer may fire while the work ends; the bar must not appear then."""
    errors = Person()
    progress = Progress(Terminal(io.StringIO(), io.StringIO(), errors), "starting")
    progress.stop()
    progress._show()
    assert errors.getvalue() == ""


def test_terminal_replaces_what_its_encoding_lacks() -> None:
    code = "from troth.cli.terminal import Terminal; Terminal().write('caf\\u00e9 \\u2603')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        env={"PYTHONIOENCODING": "latin-1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout == "café ?".encode("latin-1")


@pytest.mark.skipif(sys.platform == "win32", reason="closes descriptors through a shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_terminal_does_without_streams_that_were_closed(closed: str) -> None:
    """Python has None in their place, and every command died of it."""
    code = (
        "import os; from troth.cli.terminal import Terminal; t = Terminal(); "
        "t.line('result'); t.note('note'); t.read_input(); t.is_interactive; t.shows_progress; "
        "os._exit(os.open(os.devnull, os.O_RDONLY) < 3)"
    )
    command = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (b"" if ">&- 2" in closed or closed == ">&-" else b"result\n")
