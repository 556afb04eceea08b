"""How one model writes calls, as a grammar of them: taken from what its template writes of known ones.

Works for every format that puts a name and then the arguments as one JSON object between words that are always the
same. Calls are all an answer may be, or stand in free text, or instead of an answer that matches something else. Knows
no template engine and no session. Read next: ``probe_tools.py`` (renders the known calls), ``grammar.py`` (compiles
what comes out).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from troth.contracts.tools import CallForm, ToolPolicy, ToolSpec
from troth.errors import CapabilityUnavailable
from troth.text.grammar_schema import read_schema
from troth.text.probe_trial import CALL_IDS, FIRST, SECOND, Sample
from troth.text.tool_calls import offered
from troth.text.tool_formats import FORMATS
from troth.text.tool_formats.derived import format_of

_ANYTHING: Final = r"/(.|\n)*/"
_SPACE: Final = r"/\n{0,2}/"
_JSON_OBJECT: Final = '{"type": "object"}'

Beside = Literal["nothing", "text", "answer"]
"""What an answer may hold that is no call: nothing; any text before, between and behind calls; or instead of calls the
caller's own grammar, which the source of the calls names ``@answer``."""


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
    entries: tuple[str, ...] = ()
    """Markers by which the format's readers know that a call begins in visible text."""
    bare: tuple[str, ...] = ()
    """How an answer begins that is a call without any marker."""
    soft: bool = False
    """Ordinary text has a marker of the format too, so that not every call can be told by how it begins."""

    @property
    def marker(self) -> str:
        """The marker that ``before`` begins with; empty where the model writes its calls without one."""
        return max((mark for mark in self.entries if self.before.startswith(mark)), key=len, default="")

    def source(
        self,
        policy: ToolPolicy,
        tokens: PatternTokens,
        thought: tuple[str, str] | None = None,
        *,
        beside: Beside = "nothing",
        param: str = "tool_choice",
    ) -> str:
        """A Lark grammar of the calls that a policy lets the model make, with arguments of their schemas.

        One call only where the policy names a tool, or forbids parallel ones. Beside text the arguments of tools that
        are not strict are any object, as they would be without a grammar.

        Args:
            policy: What may be called, and how strictly.
            tokens: Marks that are control tokens in this vocabulary must come as those.
            thought: Marks of reasoning that may come first.
            beside: What else the answer may be.
            param: The field that asked, for errors.

        Raises:
            CapabilityUnavailable: calls of this form cannot be told from what may stand beside them.
            RequestError: a schema that cannot be read, or a strict one that cannot be followed.
        """
        tools = offered(policy)
        more = (
            f"({self._words(self.joint, tokens)} call)*"
            if self.joint and policy.parallel and policy.choice.mode != "named"
            else ""
        )
        first = f"({self._words(thought[0], tokens)} thought {_SPACE})?" if thought else ""
        body = f"call {more} {self._words(self.after, tokens)}"
        rules = self._answer(body, tokens, thought, beside, param)
        rules[0] = f"start: {first} {rules[0]}"
        rules.append(f"call: {' | '.join(f'call{place}' for place in range(len(tools)))}")
        for place, tool in enumerate(tools):
            free = beside == "text" and not tool.strict
            schema = _JSON_OBJECT if free else json.dumps(_arguments_schema(tool, place, param), ensure_ascii=False)
            rules.append(f"call{place}: {self._words(self._named(tool), tokens)} %json {schema}")
        if thought:
            rules.append(self._thought(thought[1], tokens))
        return "\n".join(rules) + "\n"

    def _answer(
        self, body: str, tokens: PatternTokens, thought: tuple[str, str] | None, beside: Beside, param: str
    ) -> list[str]:
        """What follows the reasoning, and the rules it needs; ``body`` is the calls behind their first words."""
        calls = f"{self._words(self.before, tokens)} {body}"
        if beside == "nothing":
            return [calls]
        marker = "" if self.soft else self.marker
        if beside == "answer":
            if not marker:
                raise _unmarked("an answer's format together with tools", param)
            return [f"(({calls}) | @answer)"]
        if not marker and (self.soft or not self.before.startswith(self.bare or ("\0",))):
            raise _unmarked("strict tools", param)
        others = [mark for mark in self.entries if mark != marker]
        first: list[str] = []
        if thought and not self._words(thought[0], tokens).startswith("<"):
            first.append(thought[0])
        if not marker:
            return [f"(({calls}) | TEXT?)", _text("TEXT", self.entries, [*first, *self.bare])]
        if self._words(marker, tokens).startswith("<"):
            # Text cannot run into a control token, so it needs no look at what comes.
            return [f"TEXT? (({calls}) TEXT?)*", _text("TEXT", self.entries, first)]
        behind = self._words(self.before.removeprefix(marker), tokens)
        return [
            f"(to_call {behind} {body})* TEXT?",
            f"to_call[suffix={_quoted(marker)}]: TO_CALL",
            _text("TO_CALL", others, first),
            _text("TEXT", self.entries, first),
        ]

    def _named(self, tool: ToolSpec) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1] if self.before.endswith('"') else tool.name
        return name + self.between

    def _thought(self, close: str, tokens: PatternTokens) -> str:
        """Anything up to the first mark that closes it."""
        return thought_rule(self._words(close, tokens))

    def _words(self, text: str, tokens: PatternTokens) -> str:
        return lark_words(text, tokens)


def thought_frame(thought: tuple[str, str], tokens: PatternTokens) -> str:
    """A Lark grammar of an answer before which reasoning between these marks may stand; it is named ``@answer``."""
    opened = lark_words(thought[0], tokens)
    return f"start: ({opened} thought {_SPACE})? @answer\n{thought_rule(lark_words(thought[1], tokens))}\n"


def thought_rule(close: str) -> str:
    """The rule of reasoning: anything up to the first mark that closes it, which is given as Lark spells it."""
    return f"thought: {_ANYTHING} {close}" if close.startswith("<") else f"thought[suffix={close}]: {_ANYTHING}"


def lark_words(text: str, tokens: PatternTokens) -> str:
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


def call_pattern(
    replies: Sequence[str], tool_format: str | None, call_form: CallForm | None = None
) -> CallPattern | None:
    """The pattern behind the replies of a probe; None when calls are written in another way.

    Args:
        replies: With the call ``FIRST``, with ``SECOND``, and perhaps with both (``probe_tools.ToolFindings.replies``).
        tool_format: Name of the format that reads them.
        call_form: That format, where no module describes it.
    """
    name = tool_format or ""
    form = FORMATS.get(name) if call_form is None else format_of(call_form, name)
    if form is None or len(replies) < 2 or any(call_id in reply for reply in replies for call_id in CALL_IDS):
        return None
    first, second = (_split(reply, sample) for reply, sample in zip(replies, (FIRST, SECOND), strict=False))
    if first is None or first != second:
        return None
    before, between, after = first
    starts = [place for mark in form.entries if (place := before.find(mark)) >= 0]
    before = before[min(starts) :] if starts else before.lstrip()
    joint = _joint(replies[2], first) if len(replies) > 2 else ""
    soft = bool(form.soft) and not before.startswith(form.soft)
    return CallPattern(before, between, joint, after.rstrip(), form.entries, form.bare, soft)


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


def _arguments_schema(tool: ToolSpec, place: int, param: str) -> Any:
    """A tool's schema as a grammar enforces it, of an object in any case. Where it is not strict, validation has what
    no grammar can enforce."""
    given = {} if tool.parameters is None or tool.parameters is True else tool.parameters
    source = json.dumps(given if given is False else {"type": "object", **given})
    where = f", tools[{place}].function.parameters"
    schema = read_schema(source, strict=tool.strict, param=param, where=where).schema
    return schema if tool.strict else _loosened(schema)


def _unmarked(capability: str, param: str) -> CapabilityUnavailable:
    return CapabilityUnavailable(
        capability, "this model writes calls without a marker by which their beginning could be told", param=param
    )


def _text(name: str, marks: Sequence[str], starts: Sequence[str]) -> str:
    """The terminal of text that holds none of ``marks`` and does not begin, white space aside, with one of ``starts``.

    One pattern for each: of several that begin alike the compiler makes more states than it may.
    """
    never = [rf"/(.|\n)*({_either(marks)})(.|\n)*/"] if marks else []
    never += [rf"/[ \t\r\n]*({_either(starts)})(.|\n)*/"] if starts else []
    return f"{name}: {' & '.join([_ANYTHING, *(f'~{one}' for one in never)])}"


def _either(texts: Sequence[str]) -> str:
    return "|".join(map(_pattern, texts))


def _pattern(text: str) -> str:
    """A text as a regular expression between slashes matches it."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda match: "\\" + match[0], text).replace("\n", "\\n")


def _loosened(schema: Any) -> Any:
    """A schema without ``oneOf``, of which no grammar can promise that no second part matches."""
    if not isinstance(schema, dict):
        return schema
    loose: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            loose[keyword] = {name: _loosened(part) for name, part in value.items()}
        elif keyword in ("allOf", "anyOf", "prefixItems"):
            loose[keyword] = [*map(_loosened, value)]
        elif keyword == "oneOf":
            loose.setdefault("allOf", []).append({"anyOf": [*map(_loosened, value)]})
        else:
            loose[keyword] = _loosened(value) if keyword in ("items", "additionalProperties") else value
    return loose


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
