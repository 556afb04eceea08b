"""Every environment variable Troth reads. A flag of the same meaning wins over it.

Only the command line reads them: the library takes options and looks at no environment. An empty variable counts as
unset. Refuses to know flags. Read next: ``values.py``, ``options.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Final

from troth.config.values import MAX_PORT, whole_number, words
from troth.errors import OptionError

PREFIX: Final = "TROTH_"


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable."""

    name: str
    field: str
    """The field of the option classes it is the default of."""
    read: Callable[[str], Any]
    """Raises ValueError with what the value must be."""
    help: str
    secret: bool = False
    """Whether its value is never shown."""

    def value(self, environ: Mapping[str, str]) -> Any | None:
        """The value in force, None when unset. Raises OptionError when it cannot be used."""
        text = environ.get(self.name, "")
        if not text:
            return None
        try:
            return self.read(text)
        except ValueError as error:
            reason = "cannot be read" if self.secret else str(error)
            raise OptionError(f"environment variable {self.name} {reason}; correct it or unset it") from None


VARIABLES: Final = (
    Variable("TROTH_MODEL", "model", str, "model to use when none is named: a folder or a .gguf file"),
    Variable("TROTH_DEVICE", "device", str, "cpu, cuda or cuda:N"),
    Variable("TROTH_THREADS", "threads", whole_number(1), "CPU threads"),
    Variable("TROTH_HOST", "host", str, "address the server listens on"),
    Variable("TROTH_PORT", "port", whole_number(0, MAX_PORT), "port the server listens on"),
    Variable("TROTH_API_KEY", "api_keys", words, "keys the server accepts, between commas", secret=True),
)
"""All of them; a test pins the list, and that there are at most eight."""


def defaults(fields: Container[str], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Option fields that the environment sets, of those in ``fields``. Raises OptionError."""
    values = {one.field: one.value(environ) for one in VARIABLES if one.field in fields}
    return {field: value for field, value in values.items() if value is not None}


def unknown(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names that look like ours and are not, in order: misspelt ones have no effect."""
    known = {one.name for one in VARIABLES}
    return tuple(sorted(name for name in environ if name.startswith(PREFIX) and name not in known))
