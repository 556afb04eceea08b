"""Owns the split of one answer: every character becomes text, reasoning, part of an accepted call, or a marker.

One pass over tokens as they come. Knows no wire format by itself, no request and no queue. Calls are proposals: what is
not accepted stays visible text. Read next: ``reply_reader.py`` (the reading), ``tool_calls.py`` (the verdict).

Laws, for any way the text is cut: joined, the texts of all pieces are the text; the outputs, folded, are the same.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from troth.contracts.events import SegmentKind
from troth.contracts.tools import ToolCall, ToolCallDelta, ToolPolicy
from troth.text.reply import Output, Piece, Reply, ReplyFormat
from troth.text.reply_reader import ReplyReader
from troth.text.tool_calls import ToolSet, offered
from troth.text.tool_formats.coercion import escaped

__all__ = ["Classifier", "Output", "Piece", "Reply", "ReplyFormat"]

# Control tokens stand in the text as one character each of a plane that no text uses; text that does use it is
# given other characters of it, so that both come back as they were.
_FIRST, _LAST = 0x100000, 0x10FFFD
_STAND_IN: Final = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


class _SpecialText:
    """Lets a control token pass through the reading as one character that no marker contains."""

    def __init__(self) -> None:
        self._by_text: dict[tuple[str, bool], str] = {}
        self._by_character: dict[str, tuple[str, bool]] = {}

    def enter(self, text: str, is_control: bool) -> str:
        if is_control and text:
            return self._stand_in(text, True)
        return _STAND_IN.sub(lambda match: self._stand_in(match[0], False), text)

    def _stand_in(self, text: str, is_control: bool) -> str:
        key = (text, is_control)
        if key not in self._by_text:
            character = chr(_FIRST + len(self._by_text))
            self._by_text[key] = character
            self._by_character[character] = key
        return self._by_text[key]

    def restored(self, text: str) -> str:
        return _STAND_IN.sub(lambda match: self._by_character[match[0]][0], text) if self._by_text else text

    def leave(self, outputs: list[Output]) -> list[Output]:
        """Put the real text back; control tokens in visible text and reasoning are markers."""
        if not self._by_text:
            return outputs
        left: list[Output] = []
        for output in outputs:
            if isinstance(output, Piece):
                left += self._pieces(output)
            elif isinstance(output, ToolCall | ToolCallDelta):
                left.append(replace(output, arguments=self._in_json(output.arguments)))
            else:
                left.append(output)
        return left

    def _pieces(self, piece: Piece) -> list[Output]:
        if piece.kind == "tool_call" or piece.verbatim:
            return [Piece(piece.kind, self.restored(piece.text))]
        pieces: list[Output] = []
        for run in re.split(f"({_STAND_IN.pattern})", piece.text):
            text, is_control = self._by_character.get(run, (run, False))
            if text:
                pieces.append(Piece("marker" if is_control else piece.kind, text))
        return pieces

    def _in_json(self, text: str) -> str:
        return _STAND_IN.sub(lambda match: escaped(self._by_character[match[0]][0]), text)


class Classifier:
    """The state of one answer."""

    def __init__(
        self,
        reply: ReplyFormat,
        policy: ToolPolicy | None = None,
        *,
        tools: ToolSet | None = None,
        prompt_tail: str = "",
        continues: SegmentKind | None = None,
        reasoning_budget: int | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            reply: How the model marks answers.
            policy: What the request says about tools.
            tools: The policy's tools, compiled; built from it when absent.
            prompt_tail: The end of the rendered prompt, 256 characters are enough.
            continues: The prompt ends inside a reply that this one carries on, in its text or its reasoning; None when
                the reply begins here.
            reasoning_budget: Tokens that reasoning may have; None for any number.

        Raises:
            RequestError: a tool that cannot be used; only when ``tools`` is absent.
        """
        policy = policy or ToolPolicy()
        if tools is None:
            tools = ToolSet(offered(policy))
        self._special = _SpecialText()
        self._reader: Final = ReplyReader(reply, policy, tools, prompt_tail, continues)
        self._budget = reasoning_budget
        self._closing = False

    def push(self, text: str, *, special: bool = False) -> list[Output]:
        """What is certain after one more token.

        Args:
            text: The token's text, whole characters only; may be empty.
            special: The token is a control token: unless its text is part of a marker it is not shown.
        """
        text = self._special.enter(text, special and not self._reader.knows(text))
        return self._special.leave(self._reader.push(text))

    def knows(self, text: str) -> bool:
        """Whether ``text`` is part of a marker, so that it means something in this answer."""
        return bool(text) and self._reader.knows(text)

    def flush(self) -> list[Output]:
        """The answer is over: what was withheld. Open calls stay text, an open span stays reasoning."""
        return self._special.leave(self._reader.flush())

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens with text that is reasoning so far."""
        return self._reader.meter.num_tokens

    @property
    def must_close(self) -> str | None:
        """The marker to force now, because reasoning has had its budget. Call ``force_close`` when doing so."""
        if self._budget is None or self._closing or not self._reader.in_reasoning:
            return None
        return self._reader.close_marker if self._reader.num_reasoning_tokens_at_most >= self._budget else None

    def end_reasoning(self) -> None:
        """From now on reasoning has no budget left."""
        self._budget = 0

    def force_close(self) -> None:
        """The next tokens are a closing marker the model did not choose; one of its own right behind it is dropped."""
        self._closing = True
        self._reader.drops_duplicate = True

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is reasoning, unless it closes it."""
        return self._reader.in_reasoning

    @property
    def unclosed_reasoning(self) -> bool:
        """The answer ended inside a span."""
        return self._reader.unclosed_reasoning

    @property
    def finished(self) -> bool:
        """The request wants one call and has it: stop generating."""
        return self._reader.finished

    @property
    def num_calls(self) -> int:
        """Accepted calls so far."""
        return self._reader.num_calls
