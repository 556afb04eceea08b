"""One request's place in its grammar: which tokens may come next, token by token, forwards and back.

Refuses to know how grammars are compiled. One thread uses a session at a time. Read next: ``grammar.py``,
``run/grammar.py``.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

from troth.contracts.counted import counted
from troth.text.grammar_start import GrammarStart
from troth.text.pattern_trial import is_exhausted, is_exhausted_by

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_RENEWALS: Final = 16
"""Times that one answer may have its matchers made anew: some hundredths of a second each."""


class TokenText(Protocol):
    """What a session needs of a tokenizer."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes of a token; a control token's are its own text."""


@dataclass(frozen=True)
class TokenVocabulary:
    """The tokens of a model as llguidance holds them. The id ``size`` is one of our own: the end of a grammar."""

    tokens: TokenText
    size: int
    """Logits of the model: bits of a mask."""
    matched: LLTokenizer

    @property
    def mask_bytes(self) -> int:
        """Whole words of 32 tokens."""
        return -(-self.size // 32) * 4

    @cached_property
    def spaced(self) -> int:
        """The mask, as an integer, of the tokens that begin with a space."""
        ids = range(self.size)
        return sum(1 << token_id for token_id in ids if self.tokens.token_bytes(token_id).startswith(b" "))


class GrammarSession:
    """The tokens of one answer so far, and what may follow them.

    Args:
        start: of the grammar.
        vocabulary: whose tokens it knows.
        eos_ids: ids that end the answer.
        begins_after: text in the output after which the grammar begins; empty: at once.
    """

    def __init__(
        self,
        start: GrammarStart,
        vocabulary: TokenVocabulary,
        eos_ids: frozenset[int],
        begins_after: str = "",
    ) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self._eos_ids = sorted(token_id for token_id in eos_ids if 0 <= token_id < vocabulary.size)
        self._marker = begins_after.encode()
        self._token_ids: list[int] = []
        self._num_before = 0
        """Tokens before the grammar began."""
        self._num_after = 0
        """Tokens that the matcher was not given: the end of the answer."""
        self._seen = b""
        """The last bytes before the grammar began, in which its marker may have begun."""
        self._ended = False
        self._num_renewals = 0
        self._renewed_at: int | None = None
        """Tokens taken in when the matchers were made anew, until these gave a mask: doing so once more is no use."""
        self._renewing = False
        self._origin = start.matchers
        self._plain, self._spaced = self._copies()
        self._matcher = self._plain
        self.begun = not self._marker
        """Whether the grammar binds the tokens to come."""
        self.fault: str | None = None
        """Why nothing can come any more although the grammar is not satisfied; None while all is well."""

    @property
    def token_ids(self) -> list[int]:
        """Tokens taken in; read only."""
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens taken in."""
        return len(self._token_ids)

    @property
    def is_accepting(self) -> bool:
        """Whether what was taken in is a whole answer."""
        return self.begun and self.fault is None and self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether it is a whole answer that nothing can follow."""
        return self.begun and self.fault is None and (self._ended or self._matcher.is_stopped())

    def mask(self) -> bytes | None:
        """Which tokens may come: bit i % 32 of the i // 32nd little-endian int32 is token i; None: any.

        Where nothing may come, ``is_complete`` or ``fault`` says why, from now on.
        """
        if not self.begun:
            return None
        nothing = bytes(self._vocabulary.mask_bytes)
        if self.fault is not None or self.is_complete:
            return nothing
        whole = self._bits()
        if whole is None:
            return nothing
        # The grammar's own end stands for all ids that end the answer, whatever else they stand for.
        end = 1 << self._vocabulary.size
        accepting, mask = bool(whole & end), whole & (end - 1)
        for token_id in self._eos_ids:
            mask = mask | 1 << token_id if accepting else mask & ~(1 << token_id)
        if not mask and accepting:
            self._ended = True
        elif not mask:
            self._fail("")
        return mask.to_bytes(self._vocabulary.mask_bytes, "little")

    def advance(self, token_id: int) -> None:
        """Take in the next token. One that the mask does not allow becomes a ``fault``."""
        self._token_ids.append(token_id)
        if not self.begun:
            self._num_before += 1
            self._look_for_marker(token_id)
        elif self.fault is None:
            if self._spaced is not None and len(self._token_ids) == 1:
                begins = self._vocabulary.tokens.token_bytes(token_id).startswith(b" ")
                self._matcher = self._spaced if begins else self._plain
            self._match(token_id)

    def fork(self) -> GrammarSession:
        """A session at the same place that goes its own way."""
        twin = copy(self)
        twin._token_ids = list(self._token_ids)
        plain = twin._plain = self._plain.deep_copy()
        spaced = twin._spaced = None if self._spaced is None else self._spaced.deep_copy()
        twin._matcher = plain if self._matcher is self._plain or spaced is None else spaced
        return twin

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back; a fault is not mended by it."""
        kept = self._token_ids[: len(self._token_ids) - num_tokens]
        if len(kept) < self._num_before:
            self._plain.reset()
            self._take_again(kept)
            return
        self._token_ids = kept
        self._matcher.rollback(max(0, num_tokens - self._num_after))
        self._num_after = max(0, self._num_after - num_tokens)
        self._ended = self._num_after > 0
        if not kept:
            self._matcher = self._plain

    def forced_ids(self) -> list[int]:
        """The tokens that must come next whatever the model says: proposals that are always accepted."""
        if not self.begun or self.fault is not None or self.is_complete:
            return []
        if self._spaced is not None and not self._token_ids:
            return []  # the answer may begin in two ways
        forced = list(self._matcher.compute_ff_tokens())
        if self._matcher.is_error():
            if not self._start_over():
                self._fail(self._matcher.get_error())
            return []
        return forced

    def _copies(self) -> tuple[LLMatcher, LLMatcher | None]:
        """Matchers of its own at the start, the second after a space that readers do not see."""
        copies = self._origin.copies()
        return copies.plain, None if self._marker else copies.spaced

    def _take_again(self, token_ids: list[int]) -> None:
        """Take tokens in from the start."""
        self._token_ids, self._num_before, self._num_after, self._seen = [], 0, 0, b""
        self.begun, self._ended = not self._marker, False
        for token_id in token_ids:
            self.advance(token_id)

    def _start_over(self) -> bool:
        """Get to this place once more, by a lexer that nobody filled; False: that does not help."""
        matchers = [self._matcher, *([self._spaced] if self._spaced is not None else [])]
        if (
            not any(map(is_exhausted, matchers))
            or self._renewing
            or self._renewed_at == self.num_tokens
            or self._num_renewals == MAX_RENEWALS
        ):
            return False
        fresh = self._start.renewed(self._origin)
        if fresh is None:
            return False
        self._renewed_at, self._num_renewals, self._renewing = self.num_tokens, self._num_renewals + 1, True
        self._origin = fresh
        self._plain, self._spaced = self._copies()
        self._matcher = self._plain
        self._take_again(self._token_ids)
        self._renewing = False
        return self.fault is None

    def _bits(self) -> int | None:
        """The mask as an integer, the grammar's own end included; None: a fault."""
        matchers = [self._matcher]
        if self._spaced is not None and not self._token_ids:
            matchers.append(self._spaced)
        found = [int.from_bytes(matcher.compute_bitmask(), "little") for matcher in matchers]
        failed = next((matcher for matcher in matchers if matcher.is_error()), None)
        if failed is None:
            self._renewed_at = None
            return found[0] if len(found) == 1 else found[0] & ~self._vocabulary.spaced | found[1]
        if self._start_over():
            return self._bits()
        if self.fault is None:
            self._fail(failed.get_error())
        return None

    def _match(self, token_id: int) -> None:
        if self._ended or self._matcher.is_stopped():
            self._num_after += 1
        elif token_id in self._eos_ids:
            if self._matcher.is_accepting():
                self._num_after += 1
                self._ended = True
            else:
                self._fail("an end came too early")
        elif not self._matcher.consume_token(token_id):
            failed = self._matcher
            if not self._start_over() and self.fault is None:
                self._fail(failed.get_error())

    def _look_for_marker(self, token_id: int) -> None:
        seen = self._seen + self._vocabulary.tokens.token_bytes(token_id)
        place = seen.find(self._marker)
        if place < 0:
            self._seen = seen[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""
            return
        self.begun = True
        # The marker's last token may bring white space, which is no part of the answer, or the answer's first bytes.
        first = seen[place + len(self._marker) :].lstrip()
        if first and not self._matcher.consume_tokens(self._vocabulary.matched.tokenize_bytes(first)):
            self._fail(self._matcher.get_error())

    def _fail(self, error: str) -> None:
        place = f"after {counted(self.num_tokens, 'token')}" if self._token_ids else "at the start of an answer"
        if is_exhausted_by(error):
            self.fault = f"the grammar cannot be followed {place}: {self._start.advice}"
            return
        reason = error.partition("<")[0].strip()[:200]
        if reason.startswith("NoExtension"):
            reason = ""  # says no more than the sentence
        self.fault = f"the grammar lets no token of this model follow {place}{f': {reason}' if reason else ''}"
