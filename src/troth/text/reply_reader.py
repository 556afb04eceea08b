"""Owns the reading of one answer, from its first character to its last: which part is what, and where calls stand.

Written as if the whole text were there (``tool_formats/reader.py`` makes that so). Knows no wire format, no control
token and no schema. Read next: ``call_reader.py`` (what happens at a call's opening marker).
"""

from __future__ import annotations

from typing import Final, Literal

from troth.contracts.events import SegmentKind
from troth.contracts.tools import ToolPolicy
from troth.text.call_reader import CallReader
from troth.text.channels import MAX_HEADER_CHARACTERS, ChannelFormat
from troth.text.reasoning import MAX_DUPLICATE_SPACE, MAX_PREFIX_CHARACTERS, ReasoningFormat, TokenMeter
from troth.text.reply import Output, Piece, PieceKind, ReplyFormat
from troth.text.tool_calls import ToolSet
from troth.text.tool_formats.reader import Malformed, Reader, Steps

MAX_SPACE_CHARACTERS: Final = 256
"""White space that is withheld, at most, while it may belong to the marker behind it."""

_Place = Literal["header", "text", "reasoning", "end"]


class ReplyReader:
    """Reads one answer. ``push`` and ``flush`` return what became certain."""

    def __init__(
        self, reply: ReplyFormat, policy: ToolPolicy, tools: ToolSet, prompt_tail: str, continues: SegmentKind | None
    ) -> None:
        self._reply = reply
        self._tail = prompt_tail
        self._continues = continues
        self._reader = Reader()
        self._outputs: list[Output] = []
        self._calls = CallReader(self._reader, reply, policy, tools, self._emit, self._outputs)
        self._space = ""  # withheld white space, at the end of what was read of the current span
        self._has_answer = continues == "text"  # something visible was said
        self.meter = TokenMeter()
        self.in_reasoning = False
        self.unclosed_reasoning = False
        self.drops_duplicate = False
        self._markers = _markers(reply)
        self._steps = self._read()
        next(self._steps, None)

    @property
    def finished(self) -> bool:
        """No further call is wanted."""
        return self._calls.finished

    @property
    def num_calls(self) -> int:
        """Accepted calls."""
        return self._calls.num_calls

    @property
    def close_marker(self) -> str | None:
        """What closes the reasoning that is open."""
        if self._reply.channels:
            return self._reply.channels.ends[0] if self._reply.channels.ends else None
        return self._reply.reasoning.close if self._reply.reasoning else None

    @property
    def num_reasoning_tokens_at_most(self) -> int:
        """Counted tokens, and those that wait only because their text ends in white space or half a character."""
        waits_for_marker = self.meter.num_unclassified != len(self._space)
        return self.meter.num_tokens + (0 if waits_for_marker else self.meter.num_waiting)

    def knows(self, text: str) -> bool:
        """Whether ``text`` is part of a marker, so that it means something here."""
        return any(text in marker for marker in self._markers)

    def push(self, text: str) -> list[Output]:
        """One more token."""
        self.meter.arrived(len(text))
        self._reader.feed(text)
        return self._advance()

    def flush(self) -> list[Output]:
        """The end of the text."""
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[Output]:
        next(self._steps, None)
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def _emit(self, kind: PieceKind, text: str, verbatim: bool = False) -> None:
        if not text:
            return
        self.meter.classified(len(text), kind == "reasoning")
        self._has_answer = self._has_answer or (kind == "text" and not text.isspace())
        last = self._outputs[-1] if self._outputs else None
        if isinstance(last, Piece) and (last.kind, last.verbatim) == (kind, verbatim):
            self._outputs[-1] = Piece(kind, last.text + text, verbatim)
        else:
            self._outputs.append(Piece(kind, text, verbatim))

    def _read(self) -> Steps[None]:
        form = self._reply.reasoning
        if self._reply.channels:
            yield from self._parts(self._reply.channels)
            return
        if form and (self._continues == "reasoning" or (not self._continues and form.starts_inside(self._tail))):
            yield from self._reasoning(form)
        elif form and self._continues is None:
            space = yield from self._reader.space(MAX_PREFIX_CHARACTERS)
            marker = yield from self._reader.literal((*form.at_once, *form.opens))
            self._emit("marker" if marker else "text", space + marker)
            if marker in form.at_once and marker:
                yield from self._after_close(form.closes)
            elif marker:
                yield from self._reasoning(form)
        yield from self._visible(())

    def _reasoning(self, form: ReasoningFormat) -> Steps[None]:
        self.in_reasoning = True
        if self._continues is None:
            yield from self._blank_lines("reasoning")
        marker = yield from self._span(form.closes)
        if marker:
            yield from self._after_close(form.closes)

    def _span(self, closes: tuple[str, ...], begins: tuple[str, ...] = ()) -> Steps[str]:
        """Reasoning up to one of ``closes`` or ``begins``; the white space before it belongs to the marker.

        One of ``begins`` is part of what comes, and not yet given to any piece.
        """
        self.in_reasoning = True
        self._space = ""
        marker = yield from self._reader.until((*closes, *begins), self._think)
        self._emit("marker" if marker else "reasoning", self._space + ("" if marker in begins else marker))
        self._space = ""
        self.in_reasoning = False
        self.unclosed_reasoning = not marker
        return marker

    def _think(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        shown = text[: max(len(shown), len(text) - MAX_SPACE_CHARACTERS)]
        self._space = text[len(shown) :]
        self._emit("reasoning", shown)

    def _after_close(self, closes: tuple[str, ...]) -> Steps[None]:
        space = ""
        if self.drops_duplicate:
            self.drops_duplicate = False
            space = yield from self._reader.space(MAX_DUPLICATE_SPACE)
            duplicate = yield from self._reader.literal(closes)
            if duplicate:
                self._emit("marker", space + duplicate)
                space = ""
        yield from self._blank_lines("text", space)

    def _blank_lines(self, kind: PieceKind, space: str = "") -> Steps[None]:
        """Blank lines behind a marker belong to it; an indent does not. ``space`` was consumed already."""
        space += yield from self._reader.space(MAX_SPACE_CHARACTERS)
        at_end = not (yield from self._reader.peek())
        cut = len(space) if at_end and kind == "text" else space.rfind("\n") + 1
        self._emit("marker", space[:cut])
        self._emit(kind, space[cut:])

    def _visible(self, stops: tuple[str, ...]) -> Steps[str]:
        """Text with calls in it, up to one of ``stops``; returns it, not yet given to any piece."""
        form = self._reply.tools
        while True:
            if form and self._calls.bare and not self._has_answer:
                self._has_answer = True
                space = yield from self._reader.space(MAX_SPACE_CHARACTERS)
                yield from self._calls.whole_answer(form, space)
            entries = self._calls.entries
            marker = yield from self._reader.until((*entries, *self._calls.frames, *stops), self._say)
            if marker in stops or not marker:
                return marker
            if marker in self._calls.frames:
                self._emit("marker", marker)
            elif form:
                yield from self._calls.read(form, marker)

    def _say(self, text: str) -> None:
        self._emit("text", text)

    def _parts(self, form: ChannelFormat) -> Steps[None]:
        """An answer whose every part has a header: what stands next, and the beginning of its header if it has one."""
        place, start = yield from self._first_place(form)
        while place != "end":
            if place == "header":
                place, start = yield from self._header(form, start)
                continue
            if place == "reasoning":
                yield from self._blank_lines("reasoning")
                marker = yield from self._span(form.ends, form.starts)
            else:
                marker = yield from self._visible((*form.ends, *form.starts))
                if marker in form.ends and marker:
                    self._emit("marker", marker)
            if marker in form.ends and marker:
                place, start = yield from self._between(form)
            else:
                place, start = ("header", marker) if marker else ("end", "")

    def _first_place(self, form: ChannelFormat) -> Steps[tuple[_Place, str]]:
        tail = self._tail.rstrip()
        if self._continues == "reasoning" or (form.reasoning_tails and tail.endswith(form.reasoning_tails)):
            return "reasoning", ""
        if self._continues == "text":
            return "text", ""
        if form.first_words:
            start = yield from self._reader.literal(form.first_words)
            return ("header", start) if start else ("text", "")
        return ("header", "") if tail.endswith(form.prompt_tails) else ("text", "")

    def _header(self, form: ChannelFormat, start: str) -> Steps[tuple[_Place, str]]:
        """A header, and a call if it says that one follows."""
        try:
            header = yield from self._reader.word((form.header_end,), MAX_HEADER_CHARACTERS, lines=True)
        except Malformed:
            self._emit("text", start)
            return "text", ""
        header = start + header
        kind, name = form.meaning(header)
        header += yield from self._reader.literal((form.header_end,))
        if kind == "call" and self._calls.enabled:
            yield from self._calls.part(header, name)
            return (yield from self._behind_call(form))
        self._emit("text" if kind == "call" else "marker", header)
        return ("reasoning" if kind == "reasoning" else "text"), ""

    def _behind_call(self, form: ChannelFormat) -> Steps[tuple[_Place, str]]:
        space = yield from self._reader.space(MAX_SPACE_CHARACTERS)
        marker = yield from self._reader.literal((*form.ends, *form.starts))
        is_over = not marker and not (yield from self._reader.peek())
        self._emit("marker" if marker or is_over else "text", space)
        if marker in form.starts:
            return "header", marker
        if not marker:
            return ("end" if is_over else "text"), ""
        self._emit("marker", marker)
        return (yield from self._between(form))

    def _between(self, form: ChannelFormat) -> Steps[tuple[_Place, str]]:
        """Behind the end of a part: the next header, or text without one."""
        space = yield from self._reader.space(MAX_SPACE_CHARACTERS)
        start = yield from self._reader.literal(form.starts)
        is_over = not start and not (yield from self._reader.peek())
        self._emit("marker" if start or is_over else "text", space)
        if start:
            return "header", start
        return ("end" if is_over else "text"), ""


def _markers(reply: ReplyFormat) -> tuple[str, ...]:
    found: list[str] = []
    if reply.reasoning:
        found += (*reply.reasoning.opens, *reply.reasoning.closes, *reply.reasoning.at_once, *reply.reasoning.frames)
    if reply.tools:
        found += (*reply.tools.markers, *reply.tools.frames, *reply.tools.inner)
    if reply.channels:
        found += (*reply.channels.starts, reply.channels.header_end, *reply.channels.ends, "<|constrain|>")
    return tuple(found)
