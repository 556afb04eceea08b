"""Owns the words for how arguments are spelled where they are no JSON object: around keys, texts and other values.

A table like ``ToolFormat``, one level further in; each body has one beside its reader, and a grammar of calls is made
of it. Reads nothing. Read next: ``xml_calls.py`` (a body with its notation), ``text/call_arguments.py`` (the grammar).

A new line in these words may be there or not. ``INDEX`` stands for the number of a call, ``KIND`` for the type of a
value, ``KEY`` for its key.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

INDEX: Final = "\0"
"""In words: the number of a call in its answer."""
KIND: Final = "\1"
"""In words: the JSON type of the value that follows, an integer being a number."""
CALL_ID: Final = "\2"
"""In words: the id of a call."""
ITEM_KEY: Final = "item"
KEY: Final = "\3"
"""In words behind a value: its key once more."""

_JSON_ESCAPES: Final = (
    r'\\["\\\/bfnrt]|\\u([0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_PYTHON_ESCAPES: Final = r"\\['\"\\nrt]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """One way to write a text as a literal."""

    mark: str
    """Opens it and closes it."""
    escapes: str = ""
    """A regular expression of what stands for characters that cannot stand there; empty: the text is as it is."""
    controls: bool = True
    """Control characters may stand there as they are."""

    def written(self, text: str) -> str | None:
        """A text between its quotes; None where it cannot be written."""
        if not self.escapes:
            return None if self.mark in text else f"{self.mark}{text}{self.mark}"
        for character, escape in (
            ("\\", "\\\\"),
            (self.mark, f"\\{self.mark}"),
            ("\n", "\\n"),
            ("\r", "\\r"),
            ("\t", "\\t"),
        ):
            text = text.replace(character, escape)
        if not self.controls:
            text = _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
        return f"{self.mark}{text}{self.mark}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """How values are written inside others, and everywhere in notations that put texts in quotes."""

    true: tuple[str, ...] = ("true",)
    false: tuple[str, ...] = ("false",)
    null: tuple[str, ...] = ("null",)
    quotes: tuple[Quote, ...]
    bare_keys: str = ""
    """A regular expression of keys that are written without quotes; empty: none are."""
    space: bool = True
    """A space may follow commas and colons."""
    sorted_keys: bool = False
    """The model was taught keys in alphabetical order."""

    def written(self, value: Any) -> list[str]:
        """A JSON value in the ways it can be written; empty: in none."""
        if value is None or isinstance(value, bool):
            return list(self.null if value is None else self.true if value else self.false)
        if isinstance(value, str):
            return [text for quote in self.quotes if (text := quote.written(value)) is not None]
        if isinstance(value, (int, float)):
            return [json.dumps(value)]
        comma, colon = (", ", ": ") if self.space else (",", ":")
        if isinstance(value, list):
            items = [self.written(item)[:1] for item in value]
            return [f"[{comma.join(item for one in items for item in one)}]"] if all(items) else []
        pairs = [(self.written_key(key)[:1], self.written(item)[:1]) for key, item in value.items()]
        members = [f"{key}{colon}{item}" for keys, items in pairs for key in keys for item in items]
        return [f"{{{comma.join(members)}}}"] if len(members) == len(pairs) else []

    def written_key(self, key: str) -> list[str]:
        """A key of an object in the ways it can be written."""
        if self.bare_keys and re.fullmatch(self.bare_keys, key):
            return [key]
        return [text for quote in self.quotes if (text := quote.written(key)) is not None]


JSON_LITERALS: Final = Literals(quotes=(Quote(mark='"', escapes=_JSON_ESCAPES, controls=False),))
PYTHON_LITERALS: Final = Literals(
    true=("True", "true"),
    false=("False", "false"),
    null=("None", "null"),
    quotes=(Quote(mark="'", escapes=_PYTHON_ESCAPES), Quote(mark='"', escapes=_PYTHON_ESCAPES)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentNotation:
    """A call from behind its name to its end.

    ``open`` (``before_key`` key ``before_value`` value ``end`` ``behind``)* ``close``, with ``separator`` between.
    """

    names: str
    """A regular expression of the tools' names that can be written."""
    keys: str
    """A regular expression of the keys that can be written."""
    open: str
    before_key: str
    before_value: str
    """Between a key and a value that is no text."""
    before_text: str | None
    """Between a key and a text that is written as it is; None: texts are literals like all values."""
    end: str = ""
    """What ends a value, and cannot be part of one."""
    behind: str = ""
    """What follows that end."""
    separator: str = ""
    close: str
    literals: Literals = JSON_LITERALS
    padded: bool = False
    """A value stands between two new lines that are not part of it, if there are two."""
    tells_texts: bool = False
    """``before_text`` says that the value is a text, so that one which looks like a number is none."""
    never_first: str = ""
    """How a text cannot begin."""
    nests: bool = False
    """Objects and arrays may be written as arguments inside the value; places of an array are called ``ITEM_KEY``."""
    quoted_values: bool = False
    """Other values too may stand in the quotes of texts."""
