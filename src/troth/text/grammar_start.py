"""Owns where the sessions of one grammar start, and makes it anew when what they share is used up.

All copies of a matcher share the states of its lexer, which are made as texts need them, up to a limit; a matcher that
met it never recovers, nor do its copies. Refuses to know tokens and requests. Read next: ``grammar_session.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from troth.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_RENEWAL_S: Final = 0.5
"""A grammar that took longer to compile is not made anew while its rows, and those beside them, wait for a mask."""


@dataclass(frozen=True, slots=True)
class Matchers:
    """A grammar at its start, and after a space that readers do not see, where there is such a space."""

    plain: LLMatcher
    spaced: LLMatcher | None

    @property
    def both(self) -> list[LLMatcher]:
        """Those there are."""
        return [self.plain] if self.spaced is None else [self.plain, self.spaced]

    def copies(self) -> Matchers:
        """Others at the same place."""
        return Matchers(self.plain.deep_copy(), None if self.spaced is None else self.spaced.deep_copy())


class GrammarStart:
    """The matchers that sessions copy. Safe to use from several threads.

    Args:
        make: Compiles them.
        advice: What a caller can do where finding the next tokens takes too much work.
    """

    def __init__(self, make: Callable[[], Matchers], advice: str) -> None:
        self._make = make
        self.advice: Final = advice
        self._lock = threading.Lock()
        self._is_spent = False
        self._matchers = self._made()

    @property
    def matchers(self) -> Matchers:
        """To copy; they are never fed."""
        return self._matchers

    @property
    def is_spent(self) -> bool:
        """Whether no session should start here any more."""
        return self._is_spent

    def renewed(self, used: Matchers) -> Matchers | None:
        """Matchers that share nothing with used ones; None: these cannot be had in the time there is."""
        with self._lock:
            if self._matchers is used:
                if self._make_s > MAX_RENEWAL_S:
                    self._is_spent = True
                    return None
                try:
                    self._matchers = self._made()
                except RequestError:  # it took far longer than before
                    self._is_spent = True
                    return None
            return self._matchers

    def _made(self) -> Matchers:
        begun = time.perf_counter()
        made = self._make()
        self._make_s = time.perf_counter() - begun
        return made
