"""Drafts that the runner makes itself, with a head or a second model that reads what the model has just computed.

How many is decided here; which, once the step is launched (``run/made_drafts.py``). Refuses to know tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from troth.contracts.plan import DRAFTED
from troth.contracts.speculation import DraftSourceName


def _works() -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeTerms:
    """What an engine has to draft with beside its model."""

    refusal: str | None
    """Why there is nothing; None: there is."""
    uncertified: bool = False
    """Whether it was loaded on demand, without a certificate."""
    failure: Callable[[], str | None] = _works
    """Why it drafts no more; None: it does. Called between steps."""


NOTHING_MADE: Final[Mapping[DraftSourceName, MadeTerms]] = {
    "mtp": MadeTerms(refusal="this engine has no draft head"),
    "draft": MadeTerms(refusal="this engine has no draft model; name one in its option draft_model (--draft-model)"),
}
"""By source: what an engine has that makes no drafts. These are the sources whose drafts are made in the step."""


class MadeSource:
    """A DraftSource that always knows something."""

    def __init__(self, name: DraftSourceName, terms: MadeTerms) -> None:
        self.name: DraftSourceName = name
        self._terms = terms

    def propose(self, token_ids: Sequence[int], num_prompt: int, num_tokens: int) -> Sequence[int]:
        """As DraftSource; DRAFTED stands for tokens that are not made yet."""
        return [DRAFTED] * num_tokens if self._terms.failure() is None else ()
