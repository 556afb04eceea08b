"""Drives a peer in another Python: one process, one JSON line per question, one per answer.

The peer's side is a script that imports nothing of this project; it answers ``{"figure": kind, "tokens": n}`` with
``{"value": tokens_per_s}``.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.lib import ROOT


class Peer:
    """A running peer. Close it to stop the process."""

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        path = ROOT / "benchmarks" / "peers" / script
        # -P: this folder, whose modules are named after the peers, must not be where the peer looks for itself.
        self._process = subprocess.Popen(
            [python, "-P", str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path("/"),
        )
        self.about: dict[str, Any] = self._read()
        """What the peer says of itself: version, settings, load time."""

    def ask(self, figure: str, tokens: int) -> float:
        """Tokens per second of one figure."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"figure": figure, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return float(self._read()["value"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith("{"):
                answer: dict[str, Any] = json.loads(text)
                return answer
        raise RuntimeError(f"the peer ended with {self._process.wait()} before it answered")
