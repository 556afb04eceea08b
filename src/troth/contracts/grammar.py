"""What an answer may be, as its caller declares it: JSON of a schema, a regular expression, a choice, a Lark grammar.

Knows kinds and sizes alone; what a grammar means, and whether it means anything, is for ``text/grammar.py`` to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from troth.contracts.bounds import mistyped, require_flag, shown
from troth.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "calls"]
"""``calls`` is a Lark grammar too, of our own making: that of tool calls."""

MAX_SOURCE_BYTES: Final[dict[GrammarKind, int]] = {
    "json_schema": 1 << 20,
    "json_object": 0,
    "regex": 16 << 10,
    "choice": 0,
    "lark": 64 << 10,
    "calls": 1 << 20,
}
MAX_FRAME_BYTES: Final = 1 << 20
MAX_GRAMMAR_CHOICES: Final = 10_000
MAX_CHOICE_BYTES: Final = 256 << 10
"""Of all choices together."""
MAX_MARKER_BYTES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One grammar. The whole answer must match it, from its first byte to its last.

    Raises:
        RequestError: a kind that is not known, or a value of the wrong type or size; ``param`` is grammar.
    """

    kind: GrammarKind
    source: str = ""
    """The schema as JSON text, the regular expression (syntax of Rust's regex crate, without look-around), or the Lark
    grammar (as llguidance reads it); empty for the other kinds."""
    choices: tuple[str, ...] = ()
    """What a choice chooses from."""
    strict: bool = False
    """Of a schema: every keyword is enforced, or the request refused. False: keywords that cannot be enforced while
    generating are left out, and named."""
    frame: str = ""
    """A Lark grammar of the whole answer, of our own making, in which ``@answer`` is this grammar: what may come before
    it, or instead of it. Empty: the answer is all there is."""
    begins_after: str = ""
    """Text in the output after which the grammar begins, such as the mark that ends reasoning; empty: at once."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise _refusal(f"kind must be one of {', '.join(get_args(GrammarKind))}, not {shown(self.kind)}")
        _require_text("source", self.source, MAX_SOURCE_BYTES[self.kind], needed=MAX_SOURCE_BYTES[self.kind] > 0)
        _require_text("frame", self.frame, MAX_FRAME_BYTES, needed=False)
        _require_text("begins_after", self.begins_after, MAX_MARKER_BYTES, needed=False)
        require_flag("grammar", self.strict)
        _require_choices(self.choices, needed=self.kind == "choice")


def _require_text(name: str, text: object, max_bytes: int, *, needed: bool) -> None:
    if not isinstance(text, str):
        raise mistyped("grammar", f"a grammar whose {name} is a string", text)
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise _refusal(f"{name} holds half of a surrogate pair at character {error.start}") from None
    if num_bytes > max_bytes:
        raise _refusal(f"{name} has {num_bytes} bytes; {max_bytes} are allowed")
    if needed and not text:
        raise _refusal(f"{name} must not be empty")


def _require_choices(choices: object, *, needed: bool) -> None:
    if not isinstance(choices, tuple) or not all(isinstance(choice, str) for choice in choices):
        raise mistyped("grammar", "a grammar whose choices are strings", choices)
    if needed != bool(choices):
        raise _refusal("choices must not be empty" if needed else "only a choice has choices")
    if len(choices) > MAX_GRAMMAR_CHOICES:
        raise _refusal(f"there are {len(choices)} choices; {MAX_GRAMMAR_CHOICES} are allowed")
    if "" in choices:
        raise _refusal("a choice must not be empty")
    _require_text("choices", "".join(choices), MAX_CHOICE_BYTES, needed=False)


def _refusal(message: str) -> RequestError:
    return RequestError(f"grammar: {message}", param="grammar", code="invalid_grammar")
