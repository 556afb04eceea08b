"""``troth serve`` as a process of its own, with the demo model unless told otherwise, and what tests ask of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx

NAME: Final = "demo"
CONTEXT: Final = 2048
MAX_ROWS: Final = 8
MAX_WAITING: Final = 64
DEADLINE_S: Final = 120
"""Only against hanging: nothing here is about speed."""
QUESTION: Final = [{"role": "user", "content": "What is the capital of France?"}]
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

_Value = TypeVar("_Value")


class DemoServer:
    """A running server; stopped by SIGTERM when left, which must go well."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """``arguments`` come after the usual ones, and win."""
        self.log = folder / "serve.log"
        """What the server and its engine wrote to standard error."""
        command = [sys.executable, "-m", "troth.cli.main", "serve", "--port", "0", "--name", NAME]
        # Two threads wait for each other by spinning: on busy cores many times slower than one.
        command += ["--threads", "1", "--context", str(CONTEXT), "--alias", "gpt-demo=demo"]
        # What earlier runs left on disk must not be served.
        command += ["--disk-cache", "off", *arguments]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TROTH_")}
        environment = {**clean, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        announced = self._process.stdout.readline()
        if not announced.startswith(f"Serving {NAME} at "):
            self._process.kill()
            raise AssertionError(f"no server: {announced}{self.log.read_text()}")
        self.url = announced.split()[3].removesuffix("/v1")
        """Without a path."""
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False)
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            exit_code = self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._process.communicate()
        assert exit_code == 0, self.log.read_text()

    @property
    def engine_process_id(self) -> int:
        """The process the model runs in: the server's only child. Linux only."""
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        (child,) = " ".join(children.read_text() for children in threads).split()
        return int(child)

    def resident_bytes(self) -> int:
        """Most memory the server process (not the engine's) ever held. Linux only."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(peak) * 1024

    def chat(self, **fields: Any) -> httpx.Response:
        """A chat about the capital of France, unless told otherwise."""
        return self.http.post(CHAT, json={"messages": QUESTION, "temperature": 0, "max_tokens": 1, **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        """A completion of one token."""
        return self.http.post(COMPLETIONS, json={"prompt": "Hi", "temperature": 0, "max_tokens": 1, **fields})

    def status(self) -> dict[str, Any]:
        """The engine's status, from the engine itself."""
        (engine,) = self.http.get("/v1/status").json()["engines"]
        return dict(engine["status"])

    def ends(self) -> dict[str, int]:
        """How many requests ended in which way so far."""
        return dict(self.status()["num_requests_by_end"])

    def wait_until_idle(self) -> None:
        """Wait until nothing runs or waits and every block is back in the pool."""
        wait_for(self._is_idle, lambda: f"still busy: {self.http.get('/v1/status').text}")

    def wait_until_ready(self) -> None:
        """Wait until /health says so."""
        wait_for(lambda: self.http.get("/health").status_code == 200, self.log.read_text)

    def _is_idle(self) -> bool:
        whole = self.http.get("/v1/status").json()
        status = whole["engines"][0]["status"]
        # A loading engine has no pools, so that "all of them are empty" would say nothing.
        return (
            status["state"] == "ready"
            and whole["generations_running"] == status["num_running"] == status["num_waiting"] == 0
            and status["blocks_used"] == [0]
        )


def wait_for(condition: Callable[[], _Value], report: Callable[[], str] = lambda: "it never happened") -> _Value:
    """The first value that counts as true."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, report()
        time.sleep(0.05)
    return value
