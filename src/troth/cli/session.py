"""A loaded model for the time of one command: options from flags, progress while it loads, memory back at the end.

Refuses to know what is asked of it. Read next: ``run.py``, ``chat.py``.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from troth import compose
from troth.cli import flags
from troth.cli.catalogue import declared
from troth.cli.progress import Progress
from troth.cli.terminal import Terminal
from troth.config.families import FAMILIES, GGUF_FAMILIES
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.progress import LoadProgress
from troth.contracts.sampling import SamplingParams
from troth.errors import CapabilityUnavailable, OptionError

if TYPE_CHECKING:
    from troth.answer_stream import AnswerStream
    from troth.artifact.artifact import Artifact
    from troth.contracts.request import Request
    from troth.library import Engine
    from troth.request_builder import RequestBuilder

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


Check = Callable[["RequestBuilder", int], None]
"""Refuses what no engine of the model could serve, before its weights are read: given what builds requests, and the
most tokens that prompt and answer can have. How many memory has room for is only known later."""


@contextmanager
def session(args: Namespace, terminal: Terminal, check: Check, *, quiet: bool = False) -> Iterator[Engine]:
    """Load the model that ``args`` name. Raises ModelLoadError, OptionError, and what ``check`` does."""
    if not args.debug:
        # What goes wrong is told once, as the command's error; the engine's own log would add a traceback.
        logging.getLogger("troth").addHandler(logging.NullHandler())
    # One person asks one thing at a time; further rows would only take memory.
    model, engine = flags.model_options(args), flags.engine_options(args, max_rows=1)
    with Progress(terminal, "starting", quiet=quiet) as progress:
        opened = open_engine(model, engine, progress, check)
    try:
        yield opened
    finally:
        opened.close()


def ask(engine: Engine, messages: list[dict[str, str]], options: dict[str, Any]) -> AnswerStream:
    """Start the answer to a conversation. Raises RequestError, and OptionError when the model knows no chat."""
    with _told_what_to_do():
        return engine.stream(messages, **options)


def chat_request(builder: RequestBuilder, messages: list[dict[str, str]], options: dict[str, Any]) -> Request:
    """The request that ``ask`` would make. Raises as ``ask``."""
    with _told_what_to_do():
        return builder.chat(messages, None, options)


@contextmanager
def _told_what_to_do() -> Iterator[None]:
    try:
        yield
    except CapabilityUnavailable as error:
        if error.capability != "chat":
            raise
        raise OptionError(f"{error}. Here: --chat-template FILE gives one, and troth run --raw needs none") from error


def open_engine(model: ModelOptions, engine: EngineOptions, progress: LoadProgress, check: Check) -> Engine:
    """Open an engine as ``Engine.open`` does, once ``check`` lets it, which needs no torch; that is imported here."""
    from troth.library import Engine
    from troth.request_builder import RequestBuilder

    artifact = compose.find(model)
    text = compose.load_text(artifact, model)
    most_tokens = model.context_tokens or declared(artifact)[1]
    if most_tokens is None or most_tokens < 1 or not _is_known(artifact):
        # Whatever keeps the model from loading at all is said first.
        most_tokens = compose.plan(artifact, model, engine).plan.declared_context_tokens
    check(RequestBuilder(text, most_tokens, text.tokenizer.vocab_size), most_tokens)
    planned = compose.plan(artifact, model, engine)
    return Engine(compose.start_engine(planned, text, progress), text)


def _is_known(artifact: Artifact) -> bool:
    """Whether some family computes this architecture, as far as its name tells."""
    if artifact.gguf is not None:
        return artifact.gguf.metadata.get("general.architecture") in GGUF_FAMILIES
    return artifact.config.get("model_type") in FAMILIES
