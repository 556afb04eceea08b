"""Owns what happens where visible text reaches the opening marker of a call: reading it, the verdict, what follows.

Knows no reasoning and no schema. A unit (a span of calls accepted together) ends accepted, or refused and shown, or was
only text about markup. Read next: ``tool_calls.py`` (the verdict), ``tool_formats/format.py`` (the table).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal, Protocol

from troth.contracts.tools import ToolCall, ToolCallDelta, ToolError, ToolErrorReason, ToolPolicy
from troth.text.reply import Output, PieceKind, ReplyFormat
from troth.text.tool_calls import MAX_ARGUMENT_CHARACTERS, MAX_CALLS, MAX_ID_CHARACTERS, ToolSet, new_id
from troth.text.tool_formats import ToolFormat
from troth.text.tool_formats.json_scan import json_value
from troth.text.tool_formats.reader import Malformed, NoCall, Reader, Steps, TooLong, Unclosed
from troth.text.tool_formats.unit import Proposal, Unit

MAX_ENTRIES: Final = 256
"""Opening markers of one answer that are looked at; behind the last of them all is text."""
_MAX_SPACE_CHARACTERS: Final = 256

Body = Callable[[Reader, Unit], Steps[None]]
Outcome = Literal["accepted", "refused", "text"]


class Emit(Protocol):
    """Where classified text goes."""

    def __call__(self, kind: PieceKind, text: str, verbatim: bool = False) -> None: ...


class CallReader:
    """The calls of one answer."""

    def __init__(
        self,
        reader: Reader,
        reply: ReplyFormat,
        policy: ToolPolicy,
        tools: ToolSet,
        emit: Emit,
        outputs: list[Output],
    ) -> None:
        self._reader = reader
        self._format = reply.tools if len(tools) else None
        self._policy = policy
        self._tools = tools
        self._emit = emit
        self._outputs = outputs
        self._ids: set[str] = set()
        self._num_entries = 0
        self._num_indices = 0
        self._streamed: dict[int, tuple[int, str]] = {}  # place in the unit -> index and id of what was streamed
        self.num_calls = 0
        self.finished = False
        """One call was wanted and is there."""
        self.enabled = len(tools) > 0
        """Calls are looked for."""
        self.frames = (
            *(reply.tools.frames if reply.tools else ()),
            *(reply.reasoning.frames if reply.reasoning else ()),
        )
        self.entries = _with_newlines(self._format.entries) if self._format else ()
        self.bare = self._format.bare if self._format else ()

    def read(self, form: ToolFormat, before: str) -> Steps[None]:
        """Behind an entry marker: its unit, and all that follow directly."""
        any_accepted = False
        while before:
            opener = before.lstrip()
            if opener in form.sections:
                space = yield from self._reader.space(_MAX_SPACE_CHARACTERS)
                opener = yield from self._reader.literal(form.opens)
                before += space + opener
                if not opener:
                    self._emit("text", before)
                    return
            outcome = yield from self._unit(form, before, opener)
            if outcome == "text":
                return
            any_accepted = any_accepted or outcome == "accepted"
            before = yield from self._following(form, any_accepted)

    def whole_answer(self, form: ToolFormat, space: str) -> Steps[None]:
        """Try the answer as one bare unit; ``space`` stands before it."""
        if (yield from self._reader.peek()) not in form.bare:
            self._emit("text", space)
            return
        outcome = yield from self._unit(form, space, "")
        if outcome != "text":
            yield from self._following(form, outcome == "accepted")

    def part(self, header: str, name: str) -> Steps[None]:
        """A call in a part of its own: the arguments are its JSON object, the name was in the header."""

        def body(reader: Reader, unit: Unit) -> Steps[None]:
            yield from reader.space()
            if (yield from reader.peek()) != "{":
                raise reader.fault("expected the arguments as a JSON object")
            unit.begin(name)
            yield from json_value(reader, unit.arguments)

        yield from self._judged(header, body)

    def _unit(self, form: ToolFormat, before: str, opener: str) -> Steps[Outcome]:
        """One unit behind its opening marker; without one (bare) it must be all there is."""

        def body(reader: Reader, unit: Unit) -> Steps[None]:
            yield from form.body(reader, unit, opener)
            if form.closes:
                yield from reader.space()
                yield from reader.expect(*form.closes)
            if opener:
                return
            yield from reader.space()
            if form.section_ends:
                yield from reader.literal(form.section_ends)
                yield from reader.space()
            if (yield from reader.peek()):
                raise NoCall("the answer goes on")

        soft = not opener or opener in form.soft
        return (yield from self._judged(before, body, soft=soft, resumes=form.resumes or form.closes))

    def _judged(self, before: str, body: Body, *, soft: bool = False, resumes: tuple[str, ...] = ()) -> Steps[Outcome]:
        """Read a unit and say what it is. ``before`` was consumed already and belongs to it."""
        self._num_entries += 1
        if self._num_entries == MAX_ENTRIES:
            self._stop()
        self._streamed.clear()
        unit = Unit(self._tools, soft=soft)
        if self._policy.eager and not soft:
            unit.listener = lambda place, text: self._stream(unit.proposals[place], place, text)
        self._reader.start_span(MAX_ARGUMENT_CHARACTERS)
        fault: Malformed | None = None
        try:
            yield from body(self._reader, unit)
        except Malformed as error:
            fault = error
        span = before + self._reader.end_span()
        if fault is None:
            return self._verdict(unit, span)
        self._emit("text", span, verbatim=True)
        if not unit.proposals or isinstance(fault, NoCall):
            return "text"
        self._refuse(unit, _reason(fault), str(fault))
        if resumes and not isinstance(fault, Unclosed):
            # What the rest of a broken call holds is data, not a new call.
            marker = yield from self._reader.until(resumes, lambda text: self._emit("text", text, verbatim=True))
            self._emit("text", marker, verbatim=True)
        return "refused"

    def _following(self, form: ToolFormat, any_accepted: bool) -> Steps[str]:
        """Behind a unit: the markers that end a wrapper, or the next opening marker, which is returned."""
        while True:
            space = yield from self._reader.space(_MAX_SPACE_CHARACTERS)
            openers = (*form.opens, *form.sections) if self.enabled else ()
            found = yield from self._reader.literal((*form.section_ends, *openers))
            if found in openers:
                return space + found
            at_end = not found and not (yield from self._reader.peek())
            is_marker = any_accepted and (at_end or bool(found))
            self._emit("marker" if is_marker else "text", space + found)
            if not found:
                return ""

    def _verdict(self, unit: Unit, span: str) -> Outcome:
        """A unit that was read to its end: accepted as a whole, or refused as a whole."""
        faults = [self._tools.fault(proposal) for proposal in unit.proposals]
        forwards = self._policy.validation == "forward"
        stopping = [fault for fault in faults if fault and not (forwards and fault.reason == "arguments_invalid")]
        if self.num_calls + len(faults) > MAX_CALLS:
            self._emit("text", span, verbatim=True)
            self._refuse(unit, "too_many_calls", f"an answer may have {MAX_CALLS} calls")
            return "refused"
        if stopping:
            self._emit("text", span, verbatim=True)
            for place, (proposal, fault) in enumerate(zip(unit.proposals, faults, strict=True)):
                message = "stands in one span with a call that was not accepted"
                fault = fault or ToolError(reason="malformed", message=message, name=proposal.name)
                self._outputs.append(replace(fault, call_id=self._streamed.get(place, (0, None))[1]))
            return "refused"
        self._emit("tool_call", span)
        for place, (proposal, fault) in enumerate(zip(unit.proposals, faults, strict=True)):
            if self.finished:
                message = "parallel_tool_calls is false and the answer has its call"
                call_id = self._streamed.get(place, (0, None))[1]
                error = ToolError(reason="too_many_calls", message=message, name=proposal.name, call_id=call_id)
                self._outputs.append(error)
            else:
                self._accept(proposal, place, fault)
        return "accepted"

    def _accept(self, proposal: Proposal, place: int, fault: ToolError | None) -> None:
        if place in self._streamed:
            index, call_id = self._streamed[place]
        else:
            index, call_id = self._numbered(proposal)
            self._outputs.append(
                ToolCallDelta(index=index, id=call_id, name=proposal.name, arguments=proposal.arguments)
            )
        error = replace(fault, call_id=call_id) if fault else None
        self._outputs.append(
            ToolCall(index=index, id=call_id, name=proposal.name, arguments=proposal.arguments, error=error)
        )
        self.num_calls += 1
        if not self._policy.parallel:
            self.finished = True
            self._stop()

    def _refuse(self, unit: Unit, reason: ToolErrorReason, message: str) -> None:
        for place, proposal in enumerate(unit.proposals):
            call_id = self._streamed.get(place, (0, None))[1]
            self._outputs.append(ToolError(reason=reason, message=message, name=proposal.name, call_id=call_id))

    def _stream(self, proposal: Proposal, place: int, text: str) -> None:
        """Pass on a call that is still open, if it is one that could be accepted."""
        if place in self._streamed:
            self._outputs.append(ToolCallDelta(index=self._streamed[place][0], arguments=text))
            return
        room = MAX_CALLS if self._policy.parallel else 1
        if not text and proposal.name in self._tools and self.num_calls + place < room:
            index, call_id = self._streamed[place] = self._numbered(proposal)
            self._outputs.append(ToolCallDelta(index=index, id=call_id, name=proposal.name))

    def _numbered(self, proposal: Proposal) -> tuple[int, str]:
        """The next index, and the call's own id where it has a usable one."""
        index, self._num_indices = self._num_indices, self._num_indices + 1
        call_id = proposal.call_id
        if not call_id or len(call_id) > MAX_ID_CHARACTERS or call_id in self._ids:
            call_id = new_id(self._format.id_style if self._format else "call")
        self._ids.add(call_id)
        return index, call_id

    def _stop(self) -> None:
        """From here on no call is looked for."""
        self.entries = ()
        self.bare = ()
        self.enabled = False


def _reason(fault: Malformed) -> ToolErrorReason:
    if isinstance(fault, Unclosed):
        return "unclosed"
    return "arguments_too_large" if isinstance(fault, TooLong) else "malformed"


def _with_newlines(entries: tuple[str, ...]) -> tuple[str, ...]:
    """A new line or two before a call is how templates set it off, not part of what was said."""
    return tuple(before + entry for entry in entries for before in ("", "\n", "\n\n"))
