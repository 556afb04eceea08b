"""Drafts of one request: who may make them, how many, and what became of them. No answer depends on any of it.

A draft is a token proposed to follow the last one; the step that feeds it draws in its place, and it counts where the
draw equals it. Read next: ``draft/`` (who proposes), ``run/draws.py`` (what counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, get_args

from troth.contracts.bounds import mistyped, require_flag, require_integer, shown
from troth.errors import RequestError

DraftSourceName = Literal["grammar", "external", "ngram", "mtp", "draft"]
"""grammar: tokens that the answer's grammar forces; external: a text the caller predicts; ngram: what followed the
same tokens earlier in prompt or answer; mtp: the model's own draft head (multi-token prediction); draft: a
second, smaller model."""
DRAFT_SOURCES: Final[tuple[DraftSourceName, ...]] = get_args(DraftSourceName)
"""In the order in which they are asked: the surest first, and last those that always know something."""
MAX_DRAFTS: Final[dict[DraftSourceName, int]] = {"grammar": 8, "external": 8, "ngram": 16, "mtp": 8, "draft": 8}
"""Most drafts of one source in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What one request says about drafts.

    Raises:
        RequestError: a value that no engine could use; ``param`` is speculation.
    """

    sources: tuple[DraftSourceName, ...] = ()
    """Who may draft; nobody: speculation is off."""
    depth: int | None = None
    """Most drafts in one step; None: as many as each source may make and the engine has fast steps for."""
    adaptive: bool = True
    """Whether the engine chooses how many of them pay, down to none; False: always as many as there are."""
    predicted_ids: tuple[int, ...] = ()
    """Tokens of the text that ``external`` proposes."""

    def __post_init__(self) -> None:
        if not isinstance(self.sources, tuple):
            raise mistyped("speculation", "a tuple of sources", self.sources)
        for name in self.sources:
            if name not in DRAFT_SOURCES:
                raise RequestError(
                    f"speculation knows {', '.join(DRAFT_SOURCES)}, not {shown(name)}", param="speculation"
                )
        if self.depth is not None:
            require_integer("speculation", self.depth, 1, max(MAX_DRAFTS.values()))
        require_flag("speculation", self.adaptive)
        if self.predicted_ids and "external" not in self.sources:
            raise RequestError("predicted_ids are for the source external, which is not named", param="speculation")


def read_speculation(value: object) -> Speculation:
    """What a caller says in short: sources between commas or in a sequence, ``off`` or none for no speculation.

    Raises:
        RequestError: it is nothing of the kind.
    """
    if isinstance(value, Speculation):
        return value
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        raise mistyped("speculation", "a Speculation, or sources", value)
    return Speculation(sources=() if list(names) == ["off"] else tuple(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """What became of the drafts of one answer, or of all answers of an engine."""

    num_verifies: int = 0
    """Steps that verified drafts."""
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    """Entry i: how many of them accepted exactly i + 1 drafts. What is left accepted none."""
    num_drafted_by_source: dict[str, int] = field(default_factory=dict)
    num_accepted_by_source: dict[str, int] = field(default_factory=dict)
    uncertified: bool = False
    """Whether a draft head may take part that no certificate speaks for: somebody asked for that."""
    disabled_reason: str | None = None
    """Why nothing was drafted in the end, in words; None: drafts were made, or nothing was there to be proposed."""


class DraftSource(Protocol):
    """Proposes the tokens of one answer. Called between steps, in the engine's thread; a call takes microseconds."""

    @property
    def name(self) -> DraftSourceName:
        """Which one it is."""

    def propose(self, token_ids: Sequence[int], num_prompt: int, num_tokens: int) -> Sequence[int]:
        """Up to ``num_tokens`` tokens to follow; fewer or none where it knows no more.

        Args:
            token_ids: prompt and answer so far; longer with every call, and otherwise the same.
            num_prompt: how many of them are the prompt.
            num_tokens: at least 1.
        """
