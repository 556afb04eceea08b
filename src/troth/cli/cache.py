"""``troth cache``: what the disk cache holds, whether it is whole, its end, and one conversation's way in and out.

Refuses to know how it is kept (``cache/disk_folder.py``). Servers may be using it meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from troth import compose
from troth.cli.cache_transfer import USAGE, transfer
from troth.cli.exit_code import DONE, FAILED, USER_ERROR
from troth.cli.progress import Progress
from troth.cli.quantity import bytes_text
from troth.cli.table import table
from troth.cli.terminal import Terminal
from troth.config.folders import disk_cache_folder
from troth.config.options import NO_DISK_CACHE
from troth.contracts.counted import counted
from troth.contracts.prefix_cache import DiskCacheContents
from troth.errors import DeviceError, OptionError

ACTIONS: Final = ("stats", "list", "verify", "flush", *USAGE)
_HEADER: Final = ("model", "kind", "files", "blocks", "size", "namespace")
_NUMBERS: Final = (2, 3, 4)
_SHOWN: Final = 12
"""Digits of a namespace that tell it from others."""


def run(args: Namespace, terminal: Terminal) -> int:
    """Do it; FAILED when ``verify`` finds damage, USER_ERROR when the folder that was named is not there.

    Raises:
        OptionError: there is no such action, or no folder is named and the user has none; and as ``transfer``.
        DeviceError: the folder cannot be used.
    """
    action, *operands = args.action or ACTIONS[:1]
    if action not in ACTIONS:
        raise OptionError(f"ACTION must be one of {', '.join(ACTIONS)}, not {action!r}")
    if operands and action not in USAGE:
        raise OptionError(f"cache {action} takes nothing more, not {operands[0]!r}")
    folder = _folder(args.disk_cache)
    with Progress(terminal, "looking at the disk cache"):
        if action in USAGE:
            told, lines = transfer(action, operands, args, folder)
        elif folder.is_dir():
            told, lines = _done(action, folder)
        else:
            told, lines = {"num_bytes": 0, "contents": []}, [f"No disk cache at {folder}."]
    if args.json:
        lines = [json.dumps({"folder": str(folder), **told}, indent=2, ensure_ascii=False)]
    for line in lines:
        terminal.line(line)
    if args.disk_cache is not None and not folder.is_dir():
        return USER_ERROR
    return FAILED if told.get("num_damaged") else DONE


def _done(action: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What came of it, as values and as lines."""
    opened = compose.disk_folder(folder)
    try:
        if action == "flush":
            num_removed = opened.clear()
            answer: tuple[dict[str, Any], list[str]] = (
                {"num_removed": num_removed},
                [f"Removed {counted(num_removed, 'file', spec=',')} from {folder}."],
            )
        elif action == "verify":
            files = opened.files()
            num_damaged = sum(opened.read(file) is None for file in files)
            answer = (
                {"num_files": len(files), "num_damaged": num_damaged},
                [f"{counted(len(files), 'file', spec=',')} read, {num_damaged} damaged and removed."],
            )
        else:
            contents = opened.contents()
            lines = _listed(contents) if action == "list" else _summed_up(folder, opened.num_bytes, contents)
            answer = (
                {"num_bytes": opened.num_bytes, "contents": [dataclasses.asdict(one) for one in contents]},
                lines,
            )
        if opened.trouble:
            raise DeviceError(opened.trouble)
        return answer
    finally:
        opened.close()


def _folder(given: str | None) -> Path:
    folder = disk_cache_folder() if given is None else Path(given).expanduser()
    if folder is None or given == NO_DISK_CACHE:
        raise OptionError("there is no folder to look at; name one with --disk-cache")
    return folder


def _summed_up(folder: Path, num_bytes: int, contents: Sequence[DiskCacheContents]) -> list[str]:
    models = counted(len({one.namespace for one in contents}), "model")
    files = counted(sum(one.num_files for one in contents), "file", spec=",")
    return [f"{bytes_text(num_bytes)} in {files} of {models} at {folder}"]


def _listed(contents: Sequence[DiskCacheContents]) -> list[str]:
    if not contents:
        return ["Nothing is kept."]
    rows = [
        (
            one.label or "-",
            one.kind,
            f"{one.num_files:,}",
            f"{one.num_blocks:,}",
            bytes_text(one.num_bytes),
            one.namespace[:_SHOWN],
        )
        for one in contents
    ]
    return table([_HEADER, *rows], right=_NUMBERS, header=True)
