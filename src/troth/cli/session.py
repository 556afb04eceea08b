"""A loaded model for the time of one command: options from flags, progress while it loads, memory back at the end.

Refuses to know what is asked of it. Read next: ``run.py``, ``chat.py``.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from troth.cli import flags
from troth.cli.progress import Progress
from troth.cli.terminal import Terminal
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.progress import LoadProgress
from troth.contracts.sampling import SamplingParams
from troth.errors import CapabilityUnavailable, OptionError

if TYPE_CHECKING:
    from troth.answer_stream import AnswerStream
    from troth.library import Engine

SAMPLING_FIELDS: Final = tuple(flag.field for flag in flags.SAMPLING.flags)


def sampling(args: Namespace) -> dict[str, Any]:
    """What the flags say about the answer, as options of ``Engine.stream``.

    Raises:
        RequestError: a value is out of bounds. Found here, so that nothing is loaded first.
    """
    options = flags.given(args, SAMPLING_FIELDS)
    SamplingParams(**{name: value for name, value in options.items() if name in SamplingParams.__dataclass_fields__})
    return options


def thinking(args: Namespace) -> dict[str, Any]:
    """What the flags say about reasoning, as options of ``Engine.stream``. Raises OptionError."""
    if args.thinking and args.no_thinking:
        raise OptionError("--thinking and --no-thinking contradict each other; drop one of them")
    options: dict[str, Any] = {} if args.reasoning_budget is None else {"reasoning_budget": args.reasoning_budget}
    if args.thinking or args.no_thinking:
        options["thinking"] = bool(args.thinking)
    return options


@contextmanager
def session(args: Namespace, terminal: Terminal, *, quiet: bool = False) -> Iterator[Engine]:
    """Load the model that ``args`` name. Raises ModelLoadError and OptionError."""
    if not args.debug:
        # What goes wrong is told once, as the command's error; the engine's own log would add a traceback.
        logging.getLogger("troth").addHandler(logging.NullHandler())
    # One person asks one thing at a time; further rows would only take memory.
    model, engine = flags.model_options(args), flags.engine_options(args, max_rows=1)
    with Progress(terminal, "starting", quiet=quiet) as progress:
        opened = open_engine(model, engine, progress)
    try:
        yield opened
    finally:
        opened.close()


def ask(engine: Engine, messages: list[dict[str, str]], options: dict[str, Any]) -> AnswerStream:
    """Start the answer to a conversation. Raises RequestError, and OptionError when the model knows no chat."""
    try:
        return engine.stream(messages, **options)
    except CapabilityUnavailable as error:
        if error.capability != "chat":
            raise
        raise OptionError(f"{error}. Here: --chat-template FILE gives one, and troth run --raw needs none") from error


def open_engine(model: ModelOptions, engine: EngineOptions, progress: LoadProgress) -> Engine:
    """Open an engine; what takes long, torch included, is imported here."""
    from troth.library import Engine

    return Engine.open(model_options=model, engine_options=engine, progress=progress)
