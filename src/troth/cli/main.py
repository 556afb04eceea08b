"""The entry of ``troth``: parses the command line, runs one command, turns errors into one line and an exit code.

Refuses to know what commands do; imports none of them, nor torch, before one is chosen. Read next: ``commands.py``,
``exit_code.py``.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from troth import __version__
from troth.cli import flags
from troth.cli.commands import COMMANDS, Command
from troth.cli.exit_code import FAILED, INTERRUPTED, OUTPUT_GONE, USER_ERROR
from troth.cli.terminal import Terminal
from troth.config import env
from troth.errors import ModelLoadError, OptionError, RequestError, TrothError

_DESCRIPTION: Final = "A local LLM inference runtime that keeps its word."
_WIDEST: Final = 110
_NEAR: Final = 0.75
"""How alike, as difflib counts, an unknown flag and one that may be meant must be."""


def main(argv: Sequence[str] | None = None, terminal: Terminal | None = None) -> int:
    """Run the command line; returns the exit code. ``argv`` is without the program's name."""
    terminal = terminal or Terminal()
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        return _dispatch(arguments, terminal, debug)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        terminal.drop_output()
        return OUTPUT_GONE
    except TrothError as error:
        if debug:
            traceback.print_exc(file=terminal.stderr)
        terminal.note(f"troth: {error}")
        return USER_ERROR if isinstance(error, OptionError | ModelLoadError | RequestError) else FAILED
    # The edge of the process: a bug is told in one line unless its place is asked for.
    except Exception as error:
        if debug:
            traceback.print_exc(file=terminal.stderr)
        hint = " (--debug shows where)" if not debug else ""
        terminal.note(f"troth: {type(error).__name__}: {error}{hint}")
        return FAILED


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(prog="troth", usage="troth COMMAND [flags]", description=_DESCRIPTION, epilog=_epilog())
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", prog="troth", parser_class=_Parser
    )
    for command in COMMANDS:
        _add_command(commands, command)
    general = _add_general(parser)
    general.add_argument("--version", action="version", version=f"troth {__version__}", help="show the version")
    return parser


def _epilog() -> str:
    width = max(len(variable.name) for variable in env.VARIABLES)
    lines = (f"  {variable.name:<{width}}  {variable.help}" for variable in env.VARIABLES)
    return "\n".join(["environment (a flag wins):", *lines, "", "troth COMMAND --help tells more of each command."])


def _add_general(parser: _Parser) -> argparse._ArgumentGroup:
    section = flags.add_group(parser, flags.GENERAL)
    section.add_argument("-h", "--help", action="help", help="show this help")
    return section


def _add_command(commands: argparse._SubParsersAction[_Parser], command: Command) -> None:
    operand = command.operand
    parser = commands.add_parser(
        command.name,
        help=command.summary,
        description=f"{command.summary[0].upper()}{command.summary[1:]}. {command.details}",
        usage=f"troth {command.name} [flags]" + (f" {operand.usage}" if operand else ""),
    )
    if operand is not None:
        parser.add_argument_group("arguments").add_argument(
            operand.field, metavar=operand.metavar, nargs=operand.nargs, help=operand.help
        )
    for group in command.groups:
        flags.add_group(parser, group)
    _add_general(parser)


def _dispatch(arguments: list[str], terminal: Terminal, debug: bool) -> int:
    parser = build_parser()
    try:
        args = parser.parse_args(arguments)
    except SystemExit as done:  # --help and --version have printed what was asked for
        return int(done.code or 0)
    if args.command is None:
        parser.print_help(terminal.stderr)
        return USER_ERROR
    args.debug = debug  # argparse forgets a flag that stands before the command
    _take_model(args)
    command = next(command for command in COMMANDS if command.name == args.command)
    return command.load()(args, terminal)


def _take_model(args: argparse.Namespace) -> None:
    operand = getattr(args, "model_operand", None)
    if operand is not None:
        if args.model is not None:
            raise OptionError(f"two models are named, {operand!r} and --model {args.model!r}; name one")
        args.model = operand


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are OptionErrors."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, add_help=False, allow_abbrev=False, formatter_class=_Help)

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        """Refuse what is not known here, so that the command's own help is pointed to."""
        namespace, unknown = super().parse_known_args(*arguments, **named)
        # A flag that is not known leaves its value behind, where an operand may be wanted; the flag alone is at fault.
        wrong = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if wrong:
            self.error(f"unknown here: {'; '.join(map(self._with_nearest, wrong))}")
        if unknown:
            self.error(f"one argument too many: {unknown[0]!r}; what has spaces stands in quotes")
        return namespace, unknown

    def _with_nearest(self, name: str) -> str:
        """The name of a flag that is not known, with the one that was meant, if that can be told."""
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        begun = [flag for flag in known if len(name) > 2 and flag.startswith(name)]
        meant = begun if len(begun) == 1 else difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
        return f"{name}, did you mean {meant[0]}?" if meant else name

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and leaving."""
        raise OptionError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


class _Help(argparse.HelpFormatter):
    """Help as wide as the terminal but no wider than is good to read, one metavar per flag, listings as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
        self._width = min(self._width, _WIDEST)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {action.metavar}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


if __name__ == "__main__":
    sys.exit(main())
