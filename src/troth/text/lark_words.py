"""Owns how texts are spelled in a Lark grammar over one vocabulary: control tokens by id, free text up to a mark.

Refuses to know calls and schemas. Syntax: llguidance's variant of Lark. Read next: ``call_pattern.py`` (words around
calls), ``call_values.py`` (values inside them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, Protocol

from troth.text.text_pattern import ANY_TEXT

ANYTHING: Final = f"/{ANY_TEXT}/"


class PatternTokens(Protocol):
    """What a grammar of marks needs of a tokenizer."""

    def encode(self, text: str, /, *, add_special: bool = True) -> list[int]:
        """The ids of a text, control tokens where it spells them."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes of a token; a control token's are its own text."""

    def is_special(self, token_id: int, /) -> bool:
        """Whether it is a control token."""


def lark_words(text: str, tokens: PatternTokens) -> str:
    """A text as Lark spells it, its control tokens by id."""
    head, rest = split_at_control(text, tokens)
    return " ".join(filter(None, [quoted(head), rest]))


def split_at_control(text: str, tokens: PatternTokens) -> tuple[str, str]:
    """What stands before the first control token, and the rest as Lark spells it; empty where there is none."""
    parts: list[str] = []
    plain, head = b"", ""
    for token_id in tokens.encode(text, add_special=False) if text else ():
        if not tokens.is_special(token_id):
            plain += tokens.token_bytes(token_id)
            continue
        head, plain_text = (plain.decode(), "") if not parts else (head, plain.decode())
        parts += [quoted(plain_text), f"<[{token_id}]>"]
        plain = b""
    if not parts:
        return text, ""
    return head, " ".join(filter(None, [*parts, quoted(plain.decode())]))


def quoted(text: str) -> str:
    """A text as a string of a grammar; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def without(marks: Sequence[str]) -> str:
    """The part of a terminal that keeps marks out of it; empty where there are none."""
    return f" & ~/(.|\\n)*({either(marks)})(.|\\n)*/" if marks else ""


def all_of(patterns: Sequence[str]) -> str:
    """A terminal of what all regular expressions match; any text where there are none."""
    return " & ".join(f"/{one}/" for one in patterns) or ANYTHING


def either(texts: Sequence[str]) -> str:
    """A regular expression, as it stands between slashes, of one of some texts."""
    return "|".join(map(_pattern, texts))


def _pattern(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda match: "\\" + match[0], text).replace("\n", "\\n")


class LarkRules:
    """Rules and terminals of one grammar, named as they are added.

    Args:
        tokens: Of the vocabulary.
        prefix: Of all their names, in small letters.
    """

    def __init__(self, tokens: PatternTokens, prefix: str) -> None:
        self.tokens = tokens
        self.lines: list[str] = []
        self._prefix = prefix
        self._num_names = 0

    def words(self, text: str) -> str:
        """A text, spelled."""
        return lark_words(text, self.tokens)

    def rule(self, body: str) -> str:
        """Add a rule; its name."""
        name = self.reserve()
        self.define(name, body)
        return name

    def reserve(self) -> str:
        """The name of a rule that is added later."""
        self._num_names += 1
        return f"{self._prefix}{self._num_names}"

    def define(self, name: str, body: str) -> None:
        """Add a rule of a reserved name."""
        self.lines.append(f"{name}: {body}")

    def terminal(self, body: str) -> str:
        """Add a terminal; its name."""
        name = self.reserve().upper()
        self.define(name, body)
        return name

    def until(self, body: str, mark: str, *, stops_anywhere: bool = False) -> str:
        """Text of a terminal's definition up to the first mark, which ends it, and the mark.

        Args:
            body: The definition.
            mark: What ends the text.
            stops_anywhere: Wherever a mark may begin, the text before it is such a text. Any other text must be told
                not to hold the mark, which costs far more where lengths are counted.
        """
        head, rest = split_at_control(mark, self.tokens)
        text = self.terminal(body if stops_anywhere and not rest else f"{body}{without([mark])}")
        if not rest:
            name = self.reserve()
            self.lines.append(f"{name}[suffix={quoted(mark)}]: {text}")
            return name
        # A control token ends the text by itself; what the mark has before it is the end of the text.
        return f"{self.terminal(f'{text} {quoted(head)}')} {rest}" if head else f"{text} {rest}"

    def one_of(self, texts: Sequence[str], mark: str) -> str:
        """One of some texts and the mark that ends it. Never one that another begins with and goes on in the mark."""
        head, rest = split_at_control(mark, self.tokens)
        whole = sorted({text + head for text in texts})
        found = " | ".join(quoted(text) for text in whole if text)
        name = self.terminal(found) if found else ""
        return f"{name}{'?' if '' in whole and name else ''} {rest}".strip()
