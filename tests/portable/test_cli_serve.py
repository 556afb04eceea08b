"""``troth serve`` as a process, its engine scripted: start, announcement, signals, failures and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli_server import fake_text
from troth.cli.served import LatePrompts, engine_client, served_model
from troth.config.folders import disk_cache_folder
from troth.config.options import EngineOptions, ModelOptions
from troth.errors import NotReady
from troth.testing.fake_engine import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class Server:
    """The process, and what it has printed so far."""

    def __init__(self, settings: dict[str, Any], arguments: tuple[str, ...], **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TROTH_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli_server", json.dumps(settings), "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**clean, **environment},
        )
        self.lines: list[str] = []
        self.url = ""

    def wait_ready(self) -> httpx.Client:
        """Read the announcement; a client of the address in it."""
        assert self.process.stdout is not None
        while not self.lines or not self.lines[-1].startswith("Ctrl-C"):
            line = self.process.stdout.readline()
            assert line, self.process.stderr and self.process.stderr.read()
            self.lines.append(line.rstrip("\n"))
        match = re.search(r"http://\S+", self.lines[0])
        assert match is not None, self.lines
        self.url = match[0].removesuffix("/v1")
        return httpx.Client(base_url=self.url, timeout=20, verify=False, trust_env=False)

    def end(self) -> tuple[int, str, str]:
        """(exit code, rest of stdout, stderr) once it has ended."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def served(*arguments: str, settings: dict[str, Any] | None = None, **environment: str) -> Iterator[Server]:
    server = Server(settings or {}, arguments, **environment)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def test_serve_announces_answers_and_stops_at_sigterm(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with served("some/model", "--rows", "3", settings={"seen": str(seen)}) as server, server.wait_ready() as client:
        assert re.fullmatch(r"Serving pebble at http://127\.0\.0\.1:\d+/v1 \(loaded in \d+\.\d s\)", server.lines[0])
        assert "8 rows, context 8,192 tokens" in server.lines[1]
        assert server.lines[2:] == ["- scripted answers need no memory", "Ctrl-C stops it."]
        reply = client.post("/v1/chat/completions", json=CHAT).json()
        assert reply["choices"][0]["message"]["content"] == "Hello from a fake engine."
        assert reply["model"] == "pebble"
        name, model, engine = json.loads(seen.read_text())
        assert (name, model) == ("pebble", repr(ModelOptions(model="some/model")))
        # What is computed outlives the server, in the user's cache folder.
        assert engine == repr(EngineOptions(max_rows=3, disk_cache=str(disk_cache_folder())))
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == (0, "", "Loading pebble ...\n")


def test_serve_lets_an_answer_end_at_ctrl_c() -> None:
    settings = {"engine": {"text": "x" * 40, "step_s": 0.02}}
    with served(settings=settings) as server, server.wait_ready() as client:
        replies: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: replies.append(client.post("/v1/chat/completions", json=CHAT)))
        asking.start()
        while httpx.get(f"{server.url}/v1/status", trust_env=False).json()["generations_running"] == 0:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        code, _, err = server.end()
        asking.join()
    assert (code, err) == (0, "Loading pebble ...\n")
    assert replies[0].json()["choices"][0]["message"]["content"] == "x" * 40


def test_serve_ends_answers_that_outlast_the_grace_with_an_error() -> None:
    """They were cut off in mid-air, with a traceback in the log: the server did not know its engine."""
    settings = {"engine": {"text": "x" * 10_000, "step_s": 0.02}, "grace_s": 0.3}
    with served(settings=settings) as server, server.wait_ready() as client:
        replies: list[httpx.Response] = []

        def ask(stream: bool) -> None:
            replies.append(client.post("/v1/chat/completions", json={**CHAT, "stream": stream}))

        asking = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for one in asking:
            one.start()
        while httpx.get(f"{server.url}/v1/status", trust_env=False).json()["generations_running"] < 2:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        code, _, err = server.end()
        for one in asking:
            one.join()
    assert (code, err) == (0, "Loading pebble ...\n")
    assert sorted(reply.status_code for reply in replies) == [200, 503]
    for reply in replies:
        last = reply.text.strip().splitlines()[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "cancelled"


def test_serve_answers_503_while_loading_and_can_be_stopped_then() -> None:
    with served(settings={"engine": {"ready": False}, "factory": f"{__name__}:build_never"}) as server:
        assert server.process.stderr is not None
        assert server.process.stderr.readline() == "Loading pebble ...\n"
        port = wait_for_port(server.process.pid)
        health = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        server.process.send_signal(signal.SIGINT)
        code, out, err = server.end()
    assert (code, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("factory", "code", "told"),
    [
        ("tests.cli_server:build_refusing", 2, "troth: pebble.gguf: does not fit: 2 bytes wanted, 1 usable"),
        (
            "tests.cli_server:build_lacking",
            2,
            "troth: speculation mtp is not available: its family has no draft heads",
        ),
        ("tests.cli_server:build_crashing", 1, "troth: pebble: engine process died (exit code 9, pid "),
    ],
)
def test_serve_ends_when_the_model_cannot_be_loaded(factory: str, code: int, told: str) -> None:
    with served(settings={"factory": factory}) as server:
        ended, out, err = server.end()
    assert (ended, out) == (code, "")
    assert err.splitlines()[-1].startswith(told)
    assert "Traceback" not in err


def test_serve_ends_when_its_engine_dies_for_good() -> None:
    with served() as server, server.wait_ready() as client:
        (pid,) = children(server.process.pid)
        os.kill(pid, signal.SIGKILL)
        code, _, err = server.end()
        assert client.base_url
    assert code == 1
    assert err.splitlines()[-1] == f"troth: pebble: engine process died (signal SIGKILL, pid {pid})"


def test_serve_refuses_an_address_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with served("--port", str(port)) as server:
            code, out, err = server.end()
    assert (code, out) == (2, "")
    assert err == (
        f"troth: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --host or --port\n"
    )


def test_serve_warms_the_prefixes_of_a_file_before_it_says_that_it_serves(tmp_path: Path) -> None:
    file = tmp_path / "warm.json"
    system = {"role": "system", "content": "Answer in one word."}
    file.write_text(json.dumps([{"id": "a", "prompt": "x" * 40}, {"id": "b", "messages": [system]}]))
    with served("--warm", str(file)) as server, server.wait_ready() as client:
        listed = client.get("/v1/cache/prefixes").json()["data"]
        assert [(pin["id"], pin["tokens"]) for pin in listed] == [("a", 32), ("b", 32)]
        server.process.send_signal(signal.SIGTERM)
        code, _, err = server.end()
    assert code == 0
    assert re.fullmatch(r"Loading pebble \.\.\.\nWarmed 2 prefixes: 74 tokens in \d+\.\d s\.\n", err)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "warm.json: there is no such file"),
        ("[{", "is not JSON: Expecting property name enclosed in double quotes at line 1, column 3"),
        ("{}", "must be a list of prefixes, not an object"),
        ("[]", "must be a list with at least one prefix"),
        (
            '[{"prompt": "long enough to be kept"}, {"text": "x"}]',
            "entry 2: must be an object with messages or a prompt",
        ),
    ],
)
def test_serve_refuses_a_warm_file_before_it_loads_anything(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "warm.json"
    if content is not None:
        file.write_text(content)
    with served("--warm", str(file)) as server:
        code, _, err = server.end()
    assert code == 2
    assert said in err
    assert str(file) in err
    assert "Loading" not in err


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"prompt": 5}, "prompt must be a string, not 5"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"prompt": "x" * 20, "model": "flint"}, "The model 'flint' is not served here. Served: pebble."),
        ({"prompt": "x" * 20, "temperature": 1}, "'temperature' is no field of a prefix"),
        ({"prompt": "x" * 20, "id": "y" * 200}, "pin must have 1 to 128 printable characters"),
        ({"prompt": "x" * 40}, "maximum context length is 32 tokens"),
    ],
)
def test_serve_refuses_a_prefix_that_can_never_be_kept_while_it_loads(
    tmp_path: Path, entry: dict[str, Any], said: str
) -> None:
    """It was found out once the weights were there, which may be minutes later."""
    file = tmp_path / "warm.json"
    file.write_text(json.dumps([{"prompt": "x" * 20}, entry]))
    never = {"engine": {"ready": False}, "factory": f"{__name__}:build_never"}
    with served("--warm", str(file), "--context", "32", settings=never) as server:
        code, out, err = server.end()
    assert (code, out) == (2, "")
    assert f"{file}: entry 2: " in err
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--alias", "a=flint"], "--alias a=flint: 'flint' is not served here; write a=pebble"),
        (["--disk-cache", __file__], f"--disk-cache {__file__}: File exists; name another folder, or off"),
        (["--disk-cache", f"{__file__}/x"], f"--disk-cache {__file__}/x: Not a directory; name another folder, or off"),
    ],
)
def test_serve_refuses_before_it_loads_anything(arguments: list[str], said: str) -> None:
    with served(*arguments) as server:
        assert server.end() == (2, "", f"troth: {said}\n")


def test_serve_ends_when_a_prefix_cannot_be_kept_and_names_it(tmp_path: Path) -> None:
    file = tmp_path / "warm.json"
    file.write_text(json.dumps([{"prompt": "x" * 40}, {"prompt": "short"}]))
    with served("--warm", str(file)) as server:
        code, out, err = server.end()
    assert (code, out) == (2, "")
    assert f"{file}: entry 2: nothing of prefix" in err


def test_serve_asks_for_the_key_of_the_environment() -> None:
    with served(TROTH_API_KEY="hunter2") as server, server.wait_ready() as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer hunter2"}).status_code == 200


def test_serve_warns_where_strangers_could_come_in() -> None:
    with served("--host", "0.0.0.0") as server, server.wait_ready():
        server.process.send_signal(signal.SIGTERM)
        code, _, err = server.end()
    assert code == 0
    assert err.startswith("Everyone who reaches 0.0.0.0 may use this server;")


def test_served_model_builds_prompts_once_the_engine_is_ready() -> None:
    engine = FakeEngine(ready=False, context_tokens=20)
    model = served_model("m", engine, fake_text())
    assert isinstance(model.prompts, LatePrompts)
    with pytest.raises(NotReady):
        model.prompts.completion("abc")
    engine.become_ready()
    assert model.prompts.completion("abc").text == "abc"
    assert list(model.prompts.token_ids([1, 2]).ids) == [1, 2]
    assert model.prompts.chat([{"role": "user", "content": "a"}]).text == "user: a\nassistant: "
    assert {name: status().max_bytes > 0 for name, status in model.objects.items()} == {
        "token_beginnings": True,
        "grammars": True,
    }


def test_engine_client_hands_options_over_as_json_can() -> None:
    client = engine_client("m", ModelOptions(model="x"), EngineOptions(threads=2, providers=("torch",)))
    options = json.loads(json.dumps(client._options))
    assert options["model"]["model"] == "x"
    assert options["engine"]["providers"] == ["torch"]
    assert client._factory == "troth.compose:build_engine"


def build_never(options: dict[str, Any], report: Any) -> Any:
    """An engine factory that loads for ever."""
    time.sleep(3600)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_port(pid: int) -> int:
    """The TCP port a process listens on."""
    for _ in range(500):
        sockets = set()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(re.sub(r"\D", "", str(link.readlink())) if "socket" in str(link.readlink()) else "")
            except OSError:
                continue
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and cells[9] in sockets:
                return int(cells[1].partition(":")[2], 16)
        time.sleep(0.02)
    raise AssertionError("it listens nowhere")
