"""Drafts that the runner makes itself, with a head or a second model that reads what the model has just computed.

How many is decided here; which, once the step is launched (``run/head_drafts.py``). Refuses to know tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from troth.contracts.plan import DRAFTED
from troth.contracts.speculation import DraftSourceName


def _works() -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTerms:
    """What an engine has to draft with beside its model."""

    refusal: str | None
    """Why there is nothing; None: there is."""
    uncertified: bool = False
    """Whether it was loaded on demand, without a certificate."""
    failure: Callable[[], str | None] = _works
    """Why it drafts no more; None: it does. Called between steps."""


NO_HEAD: Final = HeadTerms(refusal="this engine has no draft head")


class HeadSource:
    """A DraftSource that always knows something."""

    name: DraftSourceName = "mtp"

    def __init__(self, terms: HeadTerms) -> None:
        self._terms = terms

    def propose(self, token_ids: Sequence[int], num_prompt: int, num_tokens: int) -> Sequence[int]:
        """As DraftSource; DRAFTED stands for tokens that are not made yet."""
        return [DRAFTED] * num_tokens if self._terms.failure() is None else ()
