"""Every flag of the command line, declared once, in groups that commands pick from.

A flag names the option field it sets; defaults live in ``config/options.py`` and are shown from there. Refuses to know
what a command does. Read next: ``commands.py`` (who takes which group), ``config/values.py`` (how text is read).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from troth.config import env, values
from troth.config.options import EngineOptions, ModelOptions, ServeOptions
from troth.contracts.names import BLOCK_TOKENS
from troth.errors import OptionError

_DTYPES: Final = ("float32", "bfloat16", "float16")
_KV_DTYPES: Final = (*_DTYPES, "int8", "fp8")
_DEFAULTS: Final = (ModelOptions(), EngineOptions(), ServeOptions())


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag. ``read`` turns its text into the value of ``field``; None makes it a switch."""

    names: tuple[str, ...]
    field: str
    help: str
    read: Callable[[str], Any] | None = str
    metavar: str | None = None
    repeat: bool = False
    """Whether it may be given several times; its value is then a tuple."""


@dataclass(frozen=True, slots=True)
class Group:
    """Flags that belong together in help."""

    title: str
    flags: tuple[Flag, ...]


def _flag(names: str, field: str, read: Callable[[str], Any] | None, metavar: str | None, text: str) -> Flag:
    return Flag(names=tuple(names.split()), field=field, read=read, metavar=metavar, help=text)


_dtype = values.one_of(*_DTYPES)
_kv_dtype = values.one_of(*_KV_DTYPES)
_count = values.whole_number(1)
_context = values.whole_number(BLOCK_TOKENS)

MODEL: Final = Group(
    "model",
    (
        _flag(
            "-m --model",
            "model",
            values.some_text,
            "PATH",
            "folder or .gguf file (default: the demo model, if installed)",
        ),
        _flag("--context", "context_tokens", _context, "TOKENS", "most tokens of prompt plus answer"),
        _flag("--device", "device", str, "DEVICE", "cpu, cuda or cuda:N (default: cuda when present)"),
        _flag("--dtype", "dtype", _dtype, "TYPE", f"arithmetic: {', '.join(_DTYPES)}"),
        _flag(
            "--kv-dtype",
            "kv_dtype",
            _kv_dtype,
            "TYPE",
            "the KV cache: those, int8, or fp8 on a GPU (default: float16 on a CPU)",
        ),
        _flag("--weights", "weights", values.one_of("fp8"), "TYPE", "round layers to 8 bits at load, on a GPU: fp8"),
        _flag("--inputs", "inputs", values.one_of("int8"), "TYPE", "round inputs of quantised layers, on a CPU: int8"),
        _flag("--threads", "threads", _count, "N", "CPU threads (default: the cores there are)"),
        _flag("--providers", "providers", values.words, "NAMES", "op providers, first choice first; see troth doctor"),
        _flag("--deterministic", "deterministic", None, None, "the same bits whatever the batch; on a GPU, slower"),
    ),
)
"""What to load and how to compute with it."""

TEMPLATE: Final = Group(
    "chat template",
    (_flag("--chat-template", "chat_template", str, "FILE", "Jinja file to use instead of the model's own"),),
)

BATCH: Final = Group(
    "batch",
    (
        _flag(
            "--rows",
            "max_rows",
            _count,
            "N",
            "requests computed together (default: 8 on a CPU, 256 on a GPU, 1 in bench)",
        ),
        _flag("--chunk-tokens", "chunk_tokens", _count, "N", "prompt tokens fed per step beside running answers"),
        _flag("--kv-memory", "kv_memory_bytes", values.size_bytes, "SIZE", "memory of the KV cache, such as 4G"),
    ),
)
"""How requests share the model."""

DRAFTERS: Final = ("ngram", "grammar", "mtp", "draft")
"""Sources that draft without being told an answer."""
SPECULATION: Final = Group(
    "speculation",
    (
        _flag(
            "--speculate",
            "speculation",
            values.words,
            "SOURCES",
            f"who drafts tokens: {', '.join(DRAFTERS)} (default: nobody)",
        ),
        _flag(
            "--draft-model",
            "draft_model",
            values.some_text,
            "PATH",
            "a second model of the same vocabulary, for --speculate draft",
        ),
        _flag(
            "--speculate-uncertified",
            "speculate_uncertified",
            None,
            None,
            "use a draft head without a certificate (troth certify), for development",
        ),
    ),
)
"""Who drafts."""

DISK_CACHE: Final = Group(
    "disk cache",
    (
        _flag(
            "--disk-cache",
            "disk_cache",
            values.some_text,
            "FOLDER",
            "where the prompt cache outlives the process, or off (default: the user's cache folder)",
        ),
        _flag(
            "--disk-cache-size",
            "disk_cache_bytes",
            values.size_bytes,
            "SIZE",
            "most bytes kept there (default: 10 GiB or a tenth of the free disk)",
        ),
    ),
)

CACHE: Final = Group("cache", DISK_CACHE.flags[:1])

SAMPLING: Final = Group(
    "sampling",
    (
        _flag(
            "--max-tokens", "max_tokens", _count, "N", "most tokens of the answer (default: what the context leaves)"
        ),
        _flag("--temperature", "temperature", values.number, "T", "0 takes the likeliest token (default: the model's)"),
        _flag("--top-p", "top_p", values.number, "P", "draw from the likeliest tokens that make up P"),
        _flag("--top-k", "top_k", values.whole_number(0), "K", "draw from the K likeliest tokens; 0 is off"),
        _flag("--min-p", "min_p", values.number, "P", "drop tokens less likely than P times the likeliest"),
        _flag("--seed", "seed", values.whole_number(0, 2**64 - 1), "N", "same seed, same answer (default: random)"),
        Flag(
            names=("--stop",),
            field="stop",
            read=values.some_text,
            metavar="TEXT",
            help="end the answer before this text; may be repeated",
            repeat=True,
        ),
    ),
)
"""How the answer is drawn; ``contracts/sampling.py`` checks the values."""

THINKING: Final = Group(
    "thinking",
    (
        _flag("--thinking", "thinking", None, None, "reason before the answer (default: the model's template decides)"),
        _flag("--no-thinking", "no_thinking", None, None, "answer without reasoning"),
        _flag(
            "--reasoning-budget",
            "reasoning_budget",
            values.whole_number(0),
            "N",
            "most tokens of reasoning (default: no limit)",
        ),
    ),
)
"""Whether and how much the model reasons; for models that mark it."""

SERVE: Final = Group(
    "server",
    (
        _flag("--host", "host", str, "ADDRESS", "address to listen on"),
        _flag(
            "--port", "port", values.whole_number(0, values.MAX_PORT), "PORT", "port to listen on; 0 takes a free one"
        ),
        _flag("--name", "name", values.some_text, "NAME", "name the model is served under (default: from its path)"),
        Flag(
            names=("--alias",),
            field="model_aliases",
            read=values.name_pair,
            metavar="REQUESTED=SERVED",
            help="answer requests for one model name with another; may be repeated",
            repeat=True,
        ),
        Flag(
            names=("--api-key",),
            field="api_keys",
            read=values.some_text,
            metavar="KEY",
            help="key that clients must send; may be repeated (TROTH_API_KEY keeps it out of the process list)",
            repeat=True,
        ),
        Flag(
            names=("--cors-origin",),
            field="cors_origins",
            read=values.origin,
            metavar="ORIGIN",
            help="browser origin that may call; may be repeated",
            repeat=True,
        ),
        _flag("--queue", "max_waiting", values.whole_number(0), "N", "requests waiting before new ones are refused"),
        _flag("--max-streams", "max_streams", _count, "N", "answers under way at once"),
        _flag("--keepalive", "keepalive_s", values.seconds, "SECONDS", "longest silence of a stream"),
        _flag(
            "--request-timeout", "request_timeout_s", values.seconds, "SECONDS", "longest answer (default: no limit)"
        ),
        _flag("--warm", "warm", values.some_text, "FILE", "JSON list of prefixes to compute first and keep"),
    ),
)

RUN: Final = Group(
    "run",
    (
        _flag("--system", "system", str, "TEXT", "system message"),
        _flag("--raw", "raw", None, None, "continue the prompt as it is, without the chat template"),
        _flag("--json", "json", None, None, "print one JSON object at the end instead of the text"),
        _flag("-q --quiet", "quiet", None, None, "no progress and no statistics"),
    ),
)
BENCH: Final = Group(
    "bench",
    (
        _flag("--prompt-tokens", "prompt_tokens", _count, "N", "tokens of the long prompt (default: 512)"),
        _flag("--tokens", "tokens", _count, "N", "tokens of an answer (default: 64)"),
        _flag("--repetitions", "repetitions", _count, "N", "of each figure (default: 3)"),
    ),
)
CHAT: Final = Group("chat", RUN.flags[:1])
JSON: Final = Group("output", (_flag("--json", "json", None, None, "print JSON instead of a table"),))
GENERAL: Final = Group("general", (_flag("--debug", "debug", None, None, "show where an error came from"),))
"""Taken by every command, beside -h."""


def add_group(parser: argparse.ArgumentParser, group: Group) -> argparse._ArgumentGroup:
    """Add a group's flags to a parser. A flag that is not given leaves None behind."""
    section = parser.add_argument_group(group.title)
    for flag in group.flags:
        if flag.read is None:
            section.add_argument(*flag.names, dest=flag.field, action="store_true", default=None, help=flag.help)
        else:
            text = flag.help + _default(flag.field)
            section.add_argument(
                *flag.names,
                dest=flag.field,
                action="append" if flag.repeat else "store",
                type=_converter(flag.read),
                metavar=flag.metavar,
                help=text,
            )
    return section


def given(args: argparse.Namespace, fields: Iterable[str]) -> dict[str, Any]:
    """The values of those fields that a flag or an environment variable sets. Raises OptionError."""
    wanted = set(fields)
    flagged = {field: value for field, value in vars(args).items() if field in wanted and value is not None}
    # A variable that a flag overrides is not even read: its value may be unusable.
    found = env.defaults(wanted - flagged.keys()) | flagged
    return {field: tuple(value) if isinstance(value, list) else value for field, value in found.items()}


def model_options(args: argparse.Namespace) -> ModelOptions:
    """What flags and environment say about the model. Raises OptionError."""
    return ModelOptions(**given(args, ModelOptions.__dataclass_fields__))


def engine_options(args: argparse.Namespace, **presets: Any) -> EngineOptions:
    """What they say about the engine; ``presets`` are the command's own defaults. Raises OptionError."""
    options = EngineOptions(**presets | given(args, EngineOptions.__dataclass_fields__))
    for name in options.speculation if options.speculation != ("off",) else ():
        if name not in DRAFTERS:
            hint = {"external": "; a predicted text comes with a request", "off": ", which stands alone"}.get(name, "")
            raise OptionError(f"--speculate must name some of {', '.join(DRAFTERS)}, not {name!r}{hint}")
    if options.draft_model is None and "draft" in options.speculation:
        raise OptionError("--speculate draft needs a second model that drafts; name one with --draft-model")
    if options.draft_model is not None and "draft" not in options.speculation:
        # No request of a command or of HTTP asks for it by itself: the model would lie in memory for nothing.
        raise OptionError(
            f"--draft-model {options.draft_model!r} would be loaded and draft nothing; say --speculate draft beside it"
        )
    return options


def serve_options(args: argparse.Namespace) -> ServeOptions:
    """What they say about the server. Raises OptionError."""
    return ServeOptions(**given(args, ServeOptions.__dataclass_fields__))


def _converter(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _default(field: str) -> str:
    """The default of an option as help shows it, empty where None, off, an empty tuple or no option."""
    for options in _DEFAULTS:
        value = getattr(options, field, None)
        if value is not None and value is not False and value != ():
            return f" (default: {value:g})" if isinstance(value, float) else f" (default: {value})"
    return ""
