"""Drafts from what followed the same tokens earlier in prompt or answer.

The last three tokens are looked up among all earlier ones; while the answer goes on as it did there, so do the drafts.
One dictionary entry per token, whatever the length: a suffix automaton finds the longest match instead of a recent one
of three tokens, and costs ten times as much to keep. Refuses to know whether drafts pay (``drafter.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from troth.contracts.speculation import DraftSourceName

GRAM_TOKENS: Final = 3
"""Tokens that must agree before anything is proposed: two agree by accident in every other sentence."""
MAX_INDEXED: Final = 65_536
"""Tokens of a prompt that are looked at, its last: taking in so many costs some 15 ms, once."""


class NgramSource:
    """A DraftSource over the tokens of one request."""

    name: DraftSourceName = "ngram"

    def __init__(self) -> None:
        self._index: dict[tuple[int, ...], int] = {}
        """Tokens -> the position after their last occurrence."""
        self._num_taken = 0
        self._place: int | None = None
        """The position whose token is what would follow, if the answer goes on as it did before."""

    def propose(self, token_ids: Sequence[int], num_prompt: int, num_tokens: int) -> Sequence[int]:
        """As DraftSource."""
        self._take(token_ids)
        if self._place is None:
            return ()
        drafts = list(token_ids[self._place : self._place + num_tokens])
        # The end of a repetition is its beginning: what was proposed goes on with itself.
        period = len(token_ids) - self._place
        while len(drafts) < num_tokens:
            drafts.append(drafts[-period])
        return drafts

    def _take(self, token_ids: Sequence[int]) -> None:
        """Index what came since the last call, and find the place of the last tokens."""
        if self._num_taken == 0 and len(token_ids) > GRAM_TOKENS:
            known = token_ids[-MAX_INDEXED - 1 : -1]
            first = len(token_ids) - 1 - len(known) + GRAM_TOKENS
            grams = zip(*(known[i:] for i in range(GRAM_TOKENS)), strict=False)
            self._index = dict(zip(grams, range(first, len(token_ids)), strict=False))
            self._num_taken = len(token_ids) - 1
        for position in range(self._num_taken, len(token_ids)):
            if self._place is not None and token_ids[self._place] == token_ids[position]:
                self._place += 1
            else:
                self._place = None
            gram = tuple(token_ids[max(0, position + 1 - GRAM_TOKENS) : position + 1])
            earlier = self._index.get(gram)
            if len(gram) == GRAM_TOKENS:
                self._index[gram] = position + 1
            if self._place is None:
                self._place = earlier
        self._num_taken = len(token_ids)
