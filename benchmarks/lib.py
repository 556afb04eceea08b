"""What every benchmark shares: the gate, the ceiling, the stamp and the last line.

A benchmark first runs the tests of what it measures; on red it prints no number. It prints ceiling, value and ratio for
each figure, and one JSON object as its last line. ``--save`` also writes that object to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    made.add_argument("--commit", default="", help="where there is no repository to ask")
    made.add_argument("--no-gate", action="store_true", help="skip the tests (for trying things; never for a record)")
    return made


def gate(tests: Sequence[str], arguments: argparse.Namespace) -> None:
    """Run the matching tests; exit without a number when one fails."""
    if arguments.no_gate:
        return
    command = [sys.executable, "-m", "pytest", "-x", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        sys.exit("the tests of what this measures fail: no numbers")


def memory_gb_per_s(num_threads: int) -> float:
    """Read speed of main memory with this many threads, GB/s: the best of five sums over 256 MiB in large pages."""
    import numpy as np
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    data = torch.from_numpy(np.ones(64 * 2**20, dtype=np.float32))  # NumPy asks for large pages, PyTorch does not
    best = min(timed(data.sum) for _ in range(5))
    torch.set_num_threads(before)
    return data.numel() * 4 / best / 1e9


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def interleaved(runs: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Call each in turn, A B A B, after one unmeasured round; all values by name."""
    for run in runs.values():
        run()
    values: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            values[name].append(run())
    return values


def line(name: str, value: float, unit: str, ceiling: float | None = None, spread: Sequence[float] = ()) -> None:
    """Print one figure with its ceiling, their ratio and the range it was seen in."""
    text = f"{name:34} {value:10.1f} {unit}"
    if ceiling:
        text += f"   ceiling {ceiling:10.1f}   ratio {value / ceiling:5.2f}"
    if len(spread) > 1:
        text += f"   ({min(spread):.1f} to {max(spread):.1f})"
    print(text)


def stamp(options: dict[str, Any]) -> dict[str, Any]:
    """Where and with what a result was measured."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain") else ""),
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "options": options,
    }


def finish(name: str, result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the result as the last line, and keep it when asked to."""
    result["commit"] = arguments.commit or result["commit"]
    text = json.dumps({"benchmark": name} | result, sort_keys=True)
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        path = RESULTS / f"{day}-{name}-{result['commit'].rstrip('+')}.json"
        path.write_text(text + "\n")
        print(f"saved {path.relative_to(ROOT)}")
    print(text)


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    """The median of each series."""
    return {name: median(series) for name, series in values.items()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    model = next((text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")), "CPU")
    flags = next((text.split(":", 1)[1].split() for text in lines if text.startswith("flags")), [])
    widest = next((f for f in ("avx512_bf16", "avx512f", "avx2", "sse4_2") if f in flags), "baseline")
    return f"{model} ({widest})"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
