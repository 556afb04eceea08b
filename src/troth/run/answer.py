"""One answer on its way from token ids to text, reasoning and calls; for requests that say how theirs is to be read.

Control tokens are seen here, because markers may be some; what is shown is for the classifier to say. Stop strings are
looked for in visible text alone. Refuses to know segments and finish reasons. Read next: ``text/classifier.py``
(splits), ``emit.py`` (hands on).
"""

from __future__ import annotations

from collections.abc import Iterable

from troth.contracts.answer import AnswerReading
from troth.contracts.request import Request
from troth.contracts.tools import ToolCall
from troth.errors import RequestError
from troth.text.classifier import Classifier
from troth.text.detokenize import Detokenizer, TokenBytes
from troth.text.reply import Output, Piece, ReplyFormat
from troth.text.stop import StopMatcher


class AnswerReader:
    """The state of one answer.

    Raises:
        RequestError: a name that is in no registry, or a tool that cannot be used.
    """

    def __init__(self, request: Request, reading: AnswerReading, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = request.eos_ids
        self._shows_special = request.echo_special
        self._close_ids = reading.close_ids
        self._detokenizer = Detokenizer(tokenizer, skip_special=False, at_start=not request.continues_text)
        self._stops = StopMatcher(request.stop) if request.stop else None
        self._classifier = Classifier(
            _format(reading),
            reading.policy,
            prompt_tail=reading.prompt_tail,
            continues=reading.continues,
            reasoning_budget=reading.reasoning_budget,
        )
        self.num_calls = 0
        """Accepted calls that were handed on."""

    @property
    def stop_match(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stops.match if self._stops else None

    @property
    def finished(self) -> bool:
        """The request wanted one call and has it."""
        return self._classifier.finished

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens that became reasoning so far."""
        return self._classifier.num_reasoning_tokens

    @property
    def unclosed_reasoning(self) -> bool:
        """Whether the answer ended inside its reasoning."""
        return self._classifier.unclosed_reasoning

    def push(self, token_id: int) -> list[Output]:
        """What is certain after one more token; nothing counts behind a stop string."""
        special = self._tokenizer.is_special(token_id)
        ends = token_id in self._eos_ids
        if not special and not ends:
            return self._shown(self._classifier.push(self._detokenizer.push(token_id)))
        outputs: list[Output] = []
        if rest := self._detokenizer.flush():
            outputs += self._classifier.push(rest)
        text = self._tokenizer.shown_bytes(token_id, False).decode(errors="replace")
        # What ends an answer may close a call as well (Harmony's <|call|>); else it is nothing of the answer.
        if not ends or self._classifier.knows(text):
            outputs += self._classifier.push(text, special=special and not (self._shows_special and not ends))
        return self._shown(outputs)

    def take_close_ids(self) -> tuple[int, ...]:
        """The tokens to force now because reasoning has had its budget, once; mostly none."""
        if not self._close_ids or self._classifier.must_close is None:
            return ()
        self._classifier.force_close()
        return self._close_ids

    def end_reasoning(self) -> None:
        """Reasoning is to be closed now, or as it begins; ``take_close_ids`` has the tokens."""
        self._classifier.end_reasoning()

    def flush(self) -> list[Output]:
        """The end of the answer: what was withheld."""
        outputs: list[Output] = []
        if rest := self._detokenizer.flush():
            outputs += self._classifier.push(rest)
        shown = self._shown([*outputs, *self._classifier.flush()])
        if self._stops is not None and (text := self._stops.flush()):
            shown.append(Piece("text", text))
        return shown

    def _shown(self, outputs: Iterable[Output]) -> list[Output]:
        """Outputs up to a stop string in visible text; markers are not shown."""
        shown: list[Output] = []
        for output in outputs:
            if self.stop_match is not None:
                break
            if isinstance(output, Piece):
                if output.kind == "text" and self._stops is not None:
                    output = Piece("text", self._stops.push(output.text))
                if output.text and output.kind != "marker":
                    shown.append(output)
                continue
            self.num_calls += isinstance(output, ToolCall)
            shown.append(output)
        return shown


def _format(reading: AnswerReading) -> ReplyFormat:
    try:
        return ReplyFormat.named(reasoning=reading.reasoning, tools=reading.tools, call_form=reading.call_form)
    except KeyError as error:
        raise RequestError(f"no way to mark answers is called {error.args[0]!r}", param="reading") from None
