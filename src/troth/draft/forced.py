"""Drafts that the answer's grammar leaves no choice about, such as the keys of a schema.

They are still verified: a grammar fixes text, and a model may cut the same text into other tokens. Refuses to know
grammars (``run/grammar.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from troth.contracts.speculation import DraftSourceName


class GrammarSource:
    """A DraftSource over one row's grammar.

    Args:
        forced_ids: the tokens that must come next, as far as that is known; called between steps.
    """

    name: DraftSourceName = "grammar"

    def __init__(self, forced_ids: Callable[[], Sequence[int]]) -> None:
        self._forced_ids = forced_ids

    def propose(self, token_ids: Sequence[int], num_prompt: int, num_tokens: int) -> Sequence[int]:
        """As DraftSource."""
        return self._forced_ids()[:num_tokens]
