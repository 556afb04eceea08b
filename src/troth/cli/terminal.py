"""Standard input, output and error as commands use them: answers go to one, everything else to the other.

Refuses to know commands. A model's text is data: control characters in it never reach a terminal. Read next:
``progress.py``, ``answer.py``.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import Final, Literal, TextIO

from troth.errors import OptionError

# Escape sequences in an answer could move the cursor, retitle the window or fill the clipboard.
_VISIBLE: Final = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(0x7F, 0xA0), "\ufffd"
)

_DIM: Final = "\x1b[2m"
_USUAL: Final = "\x1b[22m"


class Terminal:
    """The three streams of one process.

    Args:
        stdin, stdout, stderr: text streams; None: the process's own, or the null device where it has none (``>&-``).
    """

    def __init__(self, stdin: TextIO | None = None, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.stdin = stdin or sys.stdin or _nowhere(0, "r")
        self.stdout = stdout or sys.stdout or _nowhere(1, "w")
        self.stderr = stderr or sys.stderr or _nowhere(2, "w")
        for stream in (self.stdout, self.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A character the terminal's encoding lacks must not end an answer.
                stream.reconfigure(errors="replace")

    @property
    def is_interactive(self) -> bool:
        """Whether a person types and reads."""
        return self.stdin.isatty() and self.stdout.isatty()

    @property
    def shows_progress(self) -> bool:
        """Whether a person reads standard error, so that a bar can be drawn there."""
        return self.stderr.isatty()

    def write(self, text: str) -> None:
        """Show a piece of the answer at once. Raises BrokenPipeError when nobody reads any more."""
        self.stdout.write(text.translate(_VISIBLE) if self.stdout.isatty() else text)
        self.stdout.flush()

    def write_dim(self, text: str) -> None:
        """Show a piece of what is not the answer, to a person alone. Raises BrokenPipeError as ``write``."""
        if self.stdout.isatty():
            self.stdout.write(f"{_DIM}{text.translate(_VISIBLE)}{_USUAL}")
            self.stdout.flush()

    def line(self, text: str = "") -> None:
        """Print a line of a command's result."""
        self.stdout.write(text + "\n")
        self.stdout.flush()

    def note(self, text: str) -> None:
        """Say something that is not part of the result."""
        self.stderr.write(text + "\n")
        self.stderr.flush()

    def read_input(self) -> str:
        """All of standard input. Raises OptionError when it is not UTF-8."""
        return "".join(self.input_lines())

    def input_lines(self) -> Iterator[str]:
        """The lines of standard input as they come, with their ends. Raises OptionError when one is not UTF-8."""
        # Bytes, because the text stream decodes by locale.
        lines = getattr(self.stdin, "buffer", self.stdin)
        number = 0
        while line := lines.readline():
            number += 1
            try:
                yield line if isinstance(line, str) else line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise OptionError(
                    f"standard input is not UTF-8: line {number}, {error.reason}; convert it first"
                ) from None

    def drop_output(self) -> None:
        """Throw away what is still to be written, after its reader went away."""
        # Python flushes standard output once more when it exits, and would complain there.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stdout.fileno())
        os.close(nowhere)


def _nowhere(descriptor: int, mode: Literal["r", "w"]) -> TextIO:
    """The null device, under a closed standard descriptor: nothing that is opened later may get its number."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return open(descriptor, mode, encoding="utf-8", closefd=False)
