"""How one model writes calls, as a grammar that forces some: taken from what its template writes of known ones.

Works for every format that puts a name and then the arguments as one JSON object between words that are always the
same. Knows no template engine and no session. Read next: ``probe_tools.py`` (renders the known calls), ``grammar.py``
(compiles what comes out).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from troth.contracts.grammar import Grammar
from troth.contracts.tools import ToolPolicy, ToolSpec
from troth.text.grammar_schema import read_schema
from troth.text.probe_trial import CALL_IDS, FIRST, SECOND, Sample
from troth.text.tool_calls import offered
from troth.text.tool_formats import FORMATS

_PARAM: Final = "tool_choice"
_ANYTHING: Final = r"/(.|\n)*/"
_SPACE: Final = r"/\n{0,2}/"


class PatternTokens(Protocol):
    """What a grammar of marks needs of a tokenizer."""

    def encode(self, text: str, /, *, add_special: bool = True) -> list[int]:
        """The ids of a text, control tokens where it spells them."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes of a token; a control token's are its own text."""

    def is_special(self, token_id: int, /) -> bool:
        """Whether it is a control token."""


@dataclass(frozen=True, slots=True)
class CallPattern:
    """The words around calls.

    ``before`` name ``between`` arguments (``joint`` name ``between`` arguments)* ``after``
    """

    before: str
    between: str
    joint: str
    """Between two calls of one answer; empty: there is only one."""
    after: str

    def grammar(self, policy: ToolPolicy, tokens: PatternTokens, thought: tuple[str, str] | None = None) -> Grammar:
        """One or more calls of the tools that a policy lets the model call, with arguments of their schemas.

        Args:
            policy: One call only where it names a tool, or forbids parallel ones.
            tokens: Marks that are control tokens in this vocabulary must come as those.
            thought: Marks of reasoning that may come first.

        Raises:
            RequestError: a schema that cannot be read, or all of them together are too large.
        """
        tools = offered(policy)
        calls = " | ".join(f"call{place}" for place in range(len(tools)))
        more = (
            f"({self._words(self.joint, tokens)} call)*"
            if self.joint and policy.parallel and policy.choice.mode != "named"
            else ""
        )
        first = f"({self._words(thought[0], tokens)} thought {_SPACE})?" if thought else ""
        before, after = self._words(self.before, tokens), self._words(self.after, tokens)
        rules = [f"start: {first} {before} call {more} {after}", f"call: {calls}"]
        rules += [self._call(place, tool, tokens) for place, tool in enumerate(tools)]
        if thought:
            rules.append(self._thought(thought[1], tokens))
        return Grammar(kind="lark", source="\n".join(rules) + "\n")

    def _call(self, place: int, tool: ToolSpec, tokens: PatternTokens) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1] if self.before.endswith('"') else tool.name
        schema = json.dumps(_arguments_schema(tool, place), ensure_ascii=False)
        return f"call{place}: {self._words(name + self.between, tokens)} %json {schema}"

    def _thought(self, close: str, tokens: PatternTokens) -> str:
        """Anything up to the first mark that closes it."""
        words = self._words(close, tokens)
        return f"thought: {_ANYTHING} {words}" if words.startswith("<") else f"thought[suffix={words}]: {_ANYTHING}"

    def _words(self, text: str, tokens: PatternTokens) -> str:
        """A text as Lark spells it, its control tokens by id."""
        if not text:
            return ""
        parts: list[str] = []
        plain = b""
        for token_id in tokens.encode(text, add_special=False):
            if not tokens.is_special(token_id):
                plain += tokens.token_bytes(token_id)
                continue
            parts += [_quoted(plain.decode()), f"<[{token_id}]>"]
            plain = b""
        if not parts:
            return _quoted(text)
        return " ".join(filter(None, [*parts, _quoted(plain.decode())]))


def call_pattern(replies: Sequence[str], tool_format: str | None) -> CallPattern | None:
    """The pattern behind the replies of a probe; None when calls are written in another way.

    Args:
        replies: With the call ``FIRST``, with ``SECOND``, and perhaps with both (``probe_tools.ToolFindings.replies``).
        tool_format: Name of the format that reads them.
    """
    form = FORMATS.get(tool_format or "")
    if form is None or len(replies) < 2 or any(call_id in reply for reply in replies for call_id in CALL_IDS):
        return None
    first, second = (_split(reply, sample) for reply, sample in zip(replies, (FIRST, SECOND), strict=False))
    if first is None or first != second:
        return None
    before, between, after = first
    starts = [place for mark in form.entries if (place := before.find(mark)) >= 0]
    before = before[min(starts) :] if starts else before.lstrip()
    joint = _joint(replies[2], first) if len(replies) > 2 else ""
    return CallPattern(before, between, joint, after.rstrip())


def _split(reply: str, sample: Sample) -> tuple[str, str, str] | None:
    """What stands before the name, between it and the arguments, and behind them."""
    before, found, rest = reply.partition(sample.name)
    span = _object(rest, sample.arguments)
    if not found or span is None or sample.name in rest:
        return None
    return before, rest[: span[0]], rest[span[1] :]


def _joint(reply: str, words: tuple[str, str, str]) -> str:
    """What stands between two calls; empty when they are not written one after the other."""
    before, between, after = words
    head, found, rest = reply.partition(FIRST.name + between)
    span = _object(rest, FIRST.arguments)
    if head != before or not found or span is None:
        return ""
    joint, found, rest = rest[span[1] :].partition(SECOND.name + between)
    span = _object(rest, SECOND.arguments)
    return joint if found and span is not None and rest[span[1] :] == after else ""


def _object(text: str, wanted: dict[str, Any]) -> tuple[int, int] | None:
    """Where the first JSON object in a text stands, if it is the wanted one."""
    start = text.find("{")
    try:
        value, end = json.JSONDecoder().raw_decode(text, start) if start >= 0 else (None, 0)
    except ValueError:
        return None
    return (start, end) if value == wanted else None


def _arguments_schema(tool: ToolSpec, place: int) -> Any:
    """The part of a tool's schema that a grammar can enforce, of an object in any case; validation has the rest."""
    given = {} if tool.parameters is None or tool.parameters is True else tool.parameters
    source = json.dumps(given if given is False else {"type": "object", **given})
    return read_schema(source, strict=False, param=_PARAM, where=f", tools[{place}].parameters").schema


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
