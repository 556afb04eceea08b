"""How one model writes calls, as a grammar of them: taken from what its template writes of known ones.

Works for every format that puts a name and the arguments between words that are always the same: the arguments as one
JSON object, or in a notation of the format's own. Calls are all an answer may be, or stand in free text, or instead of
an answer that matches something else. Knows no template engine and no session. Read next: ``call_words.py`` (finds the
words), ``call_arguments.py`` (notations), ``grammar.py`` (compiles what comes out).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from troth.contracts.tools import CallForm, ToolPolicy, ToolSpec
from troth.errors import CapabilityUnavailable, RequestError
from troth.text.call_arguments import ArgumentRules, spelled
from troth.text.call_words import json_object, without_ids, words_of
from troth.text.channels import CHANNELS, ChannelFormat
from troth.text.grammar_lark import LOOSE
from troth.text.grammar_parts import tool_comment, tool_field, tool_where
from troth.text.grammar_schema import read_schema
from troth.text.lark_words import ANYTHING, LarkRules, PatternTokens, either, lark_words, quoted, without
from troth.text.probe_trial import FIRST, SECOND
from troth.text.tool_calls import offered
from troth.text.tool_formats import FORMATS
from troth.text.tool_formats.derived import format_of
from troth.text.tool_formats.notation import ArgumentNotation

_SPACE: Final = r"/\n{0,2}/"
_HEADER_NAME: Final = r"[^\s<>\"\\]+"
_JSON_OBJECT: Final = '{"type": "object"}'

Beside = Literal["nothing", "text", "answer"]
"""What an answer may hold that is no call: nothing; any text before, between and behind calls; or instead of calls the
caller's own grammar, which the source of the calls names ``@answer``."""


@dataclass(frozen=True, slots=True)
class CallPattern:
    """The words around calls.

    ``before`` name ``between`` arguments (``joint`` name ``between`` arguments)* ``after``; what stands between name
    and arguments, and ends a call, is in its ``notation`` where there is one.
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
    notation: ArgumentNotation | None = None
    """How arguments are written; None: as one JSON object."""
    name_last: bool = False
    """The name stands behind the arguments (Hermes 2 Pro)."""
    channel: ChannelFormat | None = None
    """Of answers whose every part has a header: a call is a part, and all words around it are in its header."""

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
        begun: bool = False,
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
            begun: It begins right behind reasoning.
            param: The field that asked, for errors.

        Raises:
            CapabilityUnavailable: calls of this form cannot be told from what may stand beside them.
            RequestError: a schema that cannot be read, or a strict one that cannot be followed.
        """
        places = {tool.name: place for place, tool in enumerate(policy.tools)}
        tools = [(places[tool.name], tool) for tool in offered(policy)]
        more = (
            f"({self._words(self.joint, tokens)} call)*"
            if self.joint and policy.parallel and policy.choice.mode != "named"
            else ""
        )
        body = f"call {more} {self._words(self.after, tokens)}"
        if self.channel is not None:
            rules = _parts(self.channel, tokens, beside, self.entries)
        else:
            rules = self._answer(body, tokens, thought, beside, param)
        rules[0] = f"start: {_first(thought, tokens, self.channel, begun=begun)} {rules[0]}"
        rules.append(f"call: {' | '.join(f'call{place}' for place, _ in tools)}")
        for place, tool in tools:
            free = beside == "text" and not tool.strict
            rules += self._call(tool, place, tokens, free=free)
        if thought:
            rules.append(thought_rule(lark_words(thought[1], tokens)))
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
            f"to_call[suffix={quoted(marker)}]: TO_CALL",
            _text("TO_CALL", others, first),
            _text("TEXT", self.entries, first),
        ]

    def _call(self, tool: ToolSpec, place: int, tokens: PatternTokens, *, free: bool) -> list[str]:
        """The rule of a tool's calls, and those it needs."""
        if self.notation is not None:
            read = _read_schema(tool, place)
            written, rules = _notated(self.notation, tool, place, read, tokens, free=free)
            comment = tool_comment(place, tool.name, {} if free else _marked(tool, read))
        else:
            schema = _JSON_OBJECT if free else json.dumps(_marked(tool, _read_schema(tool, place)), ensure_ascii=False)
            written, rules = f"%json {schema}", []
            comment = tool_comment(place, tool.name)
        if self.channel is not None:
            if not re.fullmatch(_HEADER_NAME, tool.name):
                raise _unnameable(tool, place)
            headers = (lark_words(before + tool.name + behind, tokens) for before, behind in self.channel.call_headers)
            name = self._words(self.before + tool.name, tokens) if self.notation is not None else ""
            body = f"({' | '.join(headers)}) {name} {written} {self._words(self.after, tokens)}"
            return [comment, f"call{place}: {body}", *rules]
        head = self.between if self.name_last else self.before
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1] if head.endswith('"') else tool.name
        if self.name_last:
            return [comment, f"call{place}: {written} {self._words(self.between + name, tokens)}"]
        return [comment, f"call{place}: {self._words(name + self.between, tokens)} {written}", *rules]

    def _words(self, text: str, tokens: PatternTokens) -> str:
        return spelled(text, tokens, exact=True)


def _notated(
    notation: ArgumentNotation, tool: ToolSpec, place: int, schema: Any, tokens: PatternTokens, *, free: bool
) -> tuple[str, list[str]]:
    """A tool's call from behind its name on, with arguments of a schema that was read, and the rules it needs."""
    if not re.fullmatch(notation.names, tool.name):
        raise _unnameable(tool, place)
    field, where = tool_field(place), tool_where(tool.name)

    def refusal(keyword: str, pointer: str) -> RequestError:
        otherwise = ", or set strict to false" if tool.strict else ""
        return RequestError(
            f"{field}{where}: the schema at {pointer[:300]}: {keyword} cannot be enforced while this model's calls are "
            f"generated; leave it out{otherwise}",
            param=field,
            code="unsupported_schema" if tool.strict else "invalid_schema",
        )

    rules = LarkRules(tokens, f"c{place}v")
    body = ArgumentRules(notation, schema, rules, strict=tool.strict, refusal=refusal).call(free=free)
    if body is None:
        raise RequestError(
            f"{field}{where}: the schema at #: no arguments that it allows can be written in this model's calls",
            param=field,
            code="invalid_schema",
        )
    return body, rules.lines


def answer_frame(
    thought: tuple[str, str] | None, tokens: PatternTokens, channel: ChannelFormat | None, *, begun: bool
) -> str:
    """A Lark grammar of an answer, ``@answer``, and of what comes before it: reasoning and, in a channel, a header."""
    header = lark_words(channel.answer_header, tokens) if channel is not None else ""
    rules = [f"start: {_first(thought, tokens, channel, begun=begun)} {header} @answer"]
    return "\n".join([*rules, *([thought_rule(lark_words(thought[1], tokens))] if thought else [])]) + "\n"


def _first(
    thought: tuple[str, str] | None, tokens: PatternTokens, channel: ChannelFormat | None, *, begun: bool
) -> str:
    """What may come before an answer, ``begun`` with its reasoning or not."""
    behind = _SPACE if channel is None else lark_words(channel.next_part, tokens)
    if begun:
        return behind if channel is not None else ""
    if thought is None:
        return ""
    opened = channel.reasoning_header if channel is not None else thought[0]
    return f"({lark_words(opened, tokens)} thought {behind})?"


def _parts(channel: ChannelFormat, tokens: PatternTokens, beside: Beside, entries: Sequence[str]) -> list[str]:
    """One part that is a call, or what else the answer may be, and the rules it needs."""
    header = lark_words(channel.answer_header, tokens)
    if beside == "nothing":
        return ["call"]
    if beside == "answer":
        return [f"(call | {header} @answer)"]
    return [f"(call | {header} TEXT?)", _text("TEXT", (*channel.starts, *channel.ends, *entries), ())]


def thought_rule(close: str) -> str:
    """The rule of reasoning: anything up to the first mark that closes it, which is given as Lark spells it."""
    return f"thought: {ANYTHING} {close}" if close.startswith("<") else f"thought[suffix={close}]: {ANYTHING}"


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
    channel = _channel_of(replies)
    if channel is not None:
        # One call of an answer is enough: what ends a part may end the answer too.
        pairs = zip(replies, (FIRST, SECOND), strict=False)
        replies = [reply.removeprefix(_header(channel, sample.name)) for reply, sample in pairs]
    form = FORMATS.get(name) if call_form is None else format_of(call_form, name)
    if len(replies) < 2:
        return None
    if form is None:
        is_object = channel is not None and json_object(replies[0], FIRST.arguments) is not None
        return CallPattern("", "", "", "", channel=channel) if is_object else None
    notation = form.notation
    written = [without_ids(reply) for reply in replies]
    words = words_of(written, None)
    if words is not None:
        notation = None
    elif notation is not None:
        words = words_of(written, notation)
    if words is None:
        return None
    starts = [at for mark in form.entries if (at := words.before.find(mark)) >= 0]
    before = words.before[min(starts) :] if starts else words.before.lstrip()
    ends = [at + len(mark) for mark in (*form.closes, *form.section_ends) if (at := words.after.rfind(mark)) >= 0]
    return CallPattern(
        before,
        words.between,
        words.joint,
        words.after[: max(ends)] if ends else words.after.rstrip(),
        form.entries,
        form.bare,
        soft=bool(form.soft) and not before.startswith(form.soft),
        notation=notation,
        name_last=words.name_last,
        channel=channel,
    )


def _channel_of(replies: Sequence[str]) -> ChannelFormat | None:
    """The channel whose header all replies begin with."""
    for channel in CHANNELS.values():
        pairs = list(zip(replies, (FIRST, SECOND), strict=False))
        if channel.call_headers and pairs and all(reply.startswith(_header(channel, one.name)) for reply, one in pairs):
            return channel
    return None


def _header(channel: ChannelFormat, name: str) -> str:
    before, behind = channel.call_headers[0]
    return before + name + behind


def _marked(tool: ToolSpec, schema: Any) -> Any:
    """A tool's schema as a grammar enforces it. Where it is not strict, validation has what no grammar can enforce."""
    return schema if tool.strict or not isinstance(schema, dict) else {LOOSE: True, **schema}


def _read_schema(tool: ToolSpec, place: int) -> Any:
    """A tool's schema, of an object in any case."""
    given = {} if tool.parameters is None or tool.parameters is True else tool.parameters
    source = json.dumps(given if given is False else {"type": "object", **given})
    found = read_schema(source, strict=tool.strict, param=tool_field(place), where=tool_where(tool.name)).schema
    return {**found, "type": "object"} if isinstance(found, dict) else found


def _unnameable(tool: ToolSpec, place: int) -> CapabilityUnavailable:
    return CapabilityUnavailable(
        f"a tool that is called {tool.name[:80]!r}",
        "calls of this model cannot hold such a name",
        param=f"tools[{place}].function.name",
    )


def _unmarked(capability: str, param: str) -> CapabilityUnavailable:
    return CapabilityUnavailable(
        capability, "this model writes calls without a marker by which their beginning could be told", param=param
    )


def _text(name: str, marks: Sequence[str], starts: Sequence[str]) -> str:
    """The terminal of text that holds none of ``marks`` and does not begin, white space aside, with one of ``starts``.

    One pattern for each: of several that begin alike the compiler makes more states than it may.
    """
    never = rf" & ~/[ \t\r\n]*({either(starts)})(.|\n)*/" if starts else ""
    return f"{name}: {ANYTHING}{without(marks)}{never}"
