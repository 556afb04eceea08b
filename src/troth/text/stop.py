"""Owns stop strings: what of a text may be shown while one of them might still be coming.

Knows only text in pieces. Algorithm: Aho and Corasick 1975, one step per character, so the work is linear in the text
whatever the stop strings. Read next: ``detokenize.py`` (where the text comes from).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from troth.errors import RequestError


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The match is the one that is complete first; of several complete at the same character, the longest, so that
    nothing of any of them is shown. Text from the start of the match on is never returned. However the text is
    split, the pieces returned join to the same text.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises RequestError when a stop string is empty."""
        self.match: str | None = None
        """The stop string that was found."""
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fallback = self._link()
        self._state = 0
        # What is withheld, in pieces: the longest end of the text so far that begins a stop string.
        self._held: deque[str] = deque()
        self._num_held = 0
        self._num_taken = 0  # characters of the first piece that are gone; cutting them off would copy the rest

    def push(self, text: str) -> str:
        """The text that may be shown after this piece; nothing once a stop string was found."""
        if self.match is not None:
            return ""
        for index, character in enumerate(text):
            self._state = self._next(self._state, character)
            self.match = self._found[self._state]
            if self.match is not None:
                self._hold(text[: index + 1])
                shown = self._release(self._num_held - len(self.match))
                self._held.clear()
                self._num_held = 0
                return shown
        self._hold(text)
        return self._release(self._num_held - self._depth[self._state])

    def flush(self) -> str:
        """The text that was withheld for a stop string that did not come, at the end of the text."""
        self._state = 0
        return self._release(self._num_held)

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)
            self._num_held += len(text)

    def _release(self, count: int) -> str:
        """Take ``count`` characters off the front of what is withheld."""
        self._num_held -= count
        taken: list[str] = []
        while count:
            piece = self._held[0][self._num_taken : self._num_taken + count]
            taken.append(piece)
            count -= len(piece)
            self._num_taken += len(piece)
            if self._num_taken == len(self._held[0]):
                self._held.popleft()
                self._num_taken = 0
        return "".join(taken)

    def _next(self, state: int, character: str) -> int:
        while character not in self._children[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._children[state][character]

    def _insert(self, stop: str) -> None:
        if not stop:
            raise RequestError("a stop string must not be empty; leave it out instead", param="stop")
        state = 0
        for character in stop:
            following = self._children[state].get(character)
            if following is None:
                following = len(self._children)
                self._children[state][character] = following
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = following
        self._found[state] = stop

    def _link(self) -> list[int]:
        """For each state, that of its longest proper end which begins a stop string too; a state inherits its match."""
        fallback = [0] * len(self._children)
        waiting = deque(self._children[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._children[state].items():
                other = fallback[state]
                while other and character not in self._children[other]:
                    other = fallback[other]
                fallback[following] = self._children[other].get(character, 0)
                waiting.append(following)
            if self._found[state] is None:
                self._found[state] = self._found[fallback[state]]
        return fallback
