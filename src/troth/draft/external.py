"""Drafts from a text that the caller expects the answer to repeat in large part: a file to be edited, an answer known.

Refuses to know whether drafts pay (``drafter.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from troth.contracts.speculation import DraftSourceName

SYNC_TOKENS: Final = 2
"""Tokens that must agree before the text is followed again, from the next place where they stand."""


class ExternalSource:
    """A DraftSource over the tokens of a predicted text.

    Args:
        predicted_ids: its tokens.
    """

    name: DraftSourceName = "external"

    def __init__(self, predicted_ids: Sequence[int]) -> None:
        self._predicted = predicted_ids
        self._places: dict[tuple[int, ...], list[int]] = {}
        """Tokens -> the positions after them, ascending."""
        for end in range(SYNC_TOKENS, len(predicted_ids) + 1):
            self._places.setdefault(tuple(predicted_ids[end - SYNC_TOKENS : end]), []).append(end)
        self._place = 0
        """Where in the text the answer seems to be."""
        self._sure = 0
        """Where it was for certain: it goes on behind, even if it seemed to be further meanwhile."""
        self._num_agreed = 0
        """Tokens that agreed since the place was found."""
        self._agrees = True
        self._num_taken = 0

    def propose(self, token_ids: Sequence[int], num_prompt: int, num_tokens: int) -> Sequence[int]:
        """As DraftSource."""
        for position in range(max(self._num_taken, num_prompt), len(token_ids)):
            self._follow(token_ids, num_prompt, position)
        self._num_taken = len(token_ids)
        return self._predicted[self._place : self._place + num_tokens] if self._agrees else ()

    def _follow(self, token_ids: Sequence[int], num_prompt: int, position: int) -> None:
        """Take in one token of the answer."""
        if self._agrees and self._place < len(self._predicted) and self._predicted[self._place] == token_ids[position]:
            self._place += 1
            self._num_agreed += 1
            if self._num_agreed >= SYNC_TOKENS:
                self._sure = self._place
            return
        self._agrees, self._num_agreed = False, 0
        first = position + 1 - SYNC_TOKENS
        places = self._places.get(tuple(token_ids[first : position + 1]), []) if first >= num_prompt else []
        number = bisect_left(places, self._sure)
        if number < len(places):
            self._place, self._agrees = places[number], True
