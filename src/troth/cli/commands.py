"""The commands: what each is called, takes and says in help, and which module runs it.

A command's module is imported when the command runs, not before, and offers ``run(args, terminal) -> exit code``.
Refuses to know what it does. Read next: ``main.py``, ``flags.py``.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from troth.cli import flags
from troth.cli.flags import Group
from troth.cli.terminal import Terminal


@dataclass(frozen=True, slots=True)
class Operand:
    """An argument without a dash."""

    field: str
    metavar: str
    nargs: str
    """As argparse: ``?`` is one or none, ``*`` any number."""
    help: str

    @property
    def usage(self) -> str:
        """How a usage line shows it."""
        return f"[{self.metavar}]" if self.nargs == "?" else f"[{self.metavar} ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command."""

    name: str
    summary: str
    details: str
    groups: tuple[Group, ...]
    operand: Operand | None = None

    def load(self) -> Callable[[Namespace, Terminal], int]:
        """The function that runs it."""
        run: Callable[[Namespace, Terminal], int] = importlib.import_module(f"troth.cli.{self.name}").run
        return run


_MODEL: Final = Operand("model_operand", "MODEL", "?", "as --model")

COMMANDS: Final = (
    Command(
        name="run",
        summary="answer one prompt",
        details="Streams the answer to standard output; progress and statistics go to standard error.",
        operand=Operand("prompt", "PROMPT", "?", "the prompt; - or nothing reads standard input"),
        groups=(flags.RUN, flags.SAMPLING, flags.THINKING, flags.SPECULATION, flags.MODEL, flags.TEMPLATE),
    ),
    Command(
        name="chat",
        summary="talk with a model",
        details="Ctrl-C stops an answer and keeps what was said; Ctrl-D leaves. Type /help for commands. "
        "With piped input every line is one turn.",
        operand=_MODEL,
        groups=(flags.CHAT, flags.SAMPLING, flags.THINKING, flags.MODEL, flags.TEMPLATE),
    ),
    Command(
        name="serve",
        summary="serve a model over HTTP (OpenAI API)",
        details="Serves until Ctrl-C or SIGTERM, then lets running answers end for a few seconds and exits with 0.",
        operand=_MODEL,
        groups=(flags.SERVE, flags.BATCH, flags.SPECULATION, flags.DISK_CACHE, flags.MODEL, flags.TEMPLATE),
    ),
    Command(
        name="models",
        summary="list the models that are here",
        details="Looks at the demo model, TROTH_MODEL, the Hugging Face cache, and the places given. Loads nothing.",
        operand=Operand("paths", "PATH", "*", "a model, or a folder to look for models in"),
        groups=(flags.JSON,),
    ),
    Command(
        name="fit",
        summary="show the memory a model needs, before loading it",
        details="Exits with 1 when the model does not fit, and then names the nearest plan that does.",
        operand=_MODEL,
        groups=(flags.MODEL, flags.BATCH, flags.SPECULATION, flags.DISK_CACHE, flags.JSON),
    ),
    Command(
        name="probe",
        summary="show what a model's chat template was proved to do",
        details="Renders it with marked words and shows what came out; loads no weights. Exits with 1 when it cannot "
        "chat.",
        operand=_MODEL,
        groups=(flags.MODEL, flags.TEMPLATE, flags.JSON),
    ),
    Command(
        name="certify",
        summary="prove a model's draft head, so that it may draft",
        details="Loads the model, compares what its head drafts with a plain computation and answers with drafts with "
        "those without, and writes a certificate to the user's cache folder. Exits with 1 when the head is not proved.",
        operand=_MODEL,
        groups=(flags.MODEL, flags.TEMPLATE, flags.JSON),
    ),
    Command(
        name="bench",
        summary="measure how fast a model is here",
        details="Tokens per second of prompts and answers, with --rows also of several at once; --speculate compares "
        "answers with drafts and without, which must be equal.",
        operand=_MODEL,
        groups=(flags.BENCH, flags.SPECULATION, flags.BATCH, flags.MODEL, flags.TEMPLATE, flags.JSON),
    ),
    Command(
        name="cache",
        summary="look after the disk cache of troth serve",
        details="stats sums it up, list shows it by model, verify reads every file and removes those that are damaged "
        "(exits with 1 when there were any), flush removes everything. export PROMPT.json FILE writes what is kept "
        "of one conversation (messages or a prompt, as in a request) to a file, import FILE takes it in; "
        "both need the model.",
        operand=Operand("action", "ACTION", "*", "stats (the default), list, verify, flush, export or import"),
        groups=(flags.CACHE, flags.MODEL, flags.JSON),
    ),
    Command(
        name="doctor",
        summary="check this machine and this installation",
        details="Exits with 1 when something is wrong, and names it.",
        groups=(flags.JSON,),
    ),
)
"""In the order of help."""
