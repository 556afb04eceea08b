"""Drafts that are made in the step that verifies them: fills what a plan leaves open, whoever knows how.

A proposer keeps what it needs in step with the model, for every row, whether it is drafted for or not. One that fails
is left alone from then on, and answers go on without its drafts.
Refuses to know what proposers compute (``head_drafts.py``, ``model_drafts.py``), how drafts are verified (``draws.py``)
and when they pay (``draft/worth.py``). Legend: T tokens, R rows, D model width, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from troth.contracts.names import Row
from troth.contracts.plan import DRAFTED, StepPlan
from troth.nn.batch import GroupTables

_log = logging.getLogger(__name__)
R = TypeVar("R")
FILLER: Final = 0
"""A draft that nobody thought of. It is verified like any other."""


class Tables(Protocol):
    """The block tables of a followed plan; ``batch.py`` and ``device_batch.py``."""

    last_token: Tensor
    """int64: what ON_DEVICE entries of a plan stand for, by row."""

    @property
    def table_GPB(self) -> Tensor | None:
        """int32 [groups, rows, B], the last row being padding's, where they lie on the device; None elsewhere."""

    def tables(self, group: int, rows: Sequence[Row], row_T: Sequence[Row], position_T: Sequence[int]) -> GroupTables:
        """Blocks of ``rows`` in one group, and the slots of tokens anywhere in them."""


@dataclass(slots=True)
class OpenDrafts:
    """The drafts of one row that a plan leaves to the runner."""

    row: Row
    at: int
    """Index of the first into the plan's tokens."""
    count: int
    position: int
    """Of the last known token, behind which they are fed."""
    step: int
    """Which output token the first one is."""


Draw = Callable[[Tensor, Sequence[OpenDrafts], int], Tensor]
"""Draws tokens, int64 [R], from logits, float32 [R, V], of these rows at this depth."""
Watch = Callable[[Tensor, Sequence[OpenDrafts], int], None]
"""Gets logits, float32 [R, V], overwritten later, of drafts of these rows at this depth, from 0."""


class Guess(Protocol):
    """Draws a draft as the step that verifies it will draw in its place; ``sampler.py``."""

    def guess(self, logits_RV: Tensor, rows: Sequence[Row], steps: Sequence[int]) -> Tensor:
        """int64 [R]."""


class Proposer(Protocol):
    """Knows what may follow."""

    name: str
    """What it is, in words."""
    reads_hidden: bool
    """Whether it needs the hidden state of every token."""

    def follow(self, plan: StepPlan) -> None:
        """Take in the rows that a plan admits, and where the others go on; once per plan."""

    def propose(self, plan: StepPlan, wanted: Sequence[OpenDrafts], draw: Draw) -> list[Tensor]:
        """Make drafts for a followed plan.

        Args:
            plan: its drafts are open.
            wanted: those that want most come first.
            draw: draws the drafts.

        Returns:
            By depth, int64, of the rows that want so many.
        """

    def note(self, plan: StepPlan, hidden_TD: Tensor) -> None:
        """Take in a computed step, before it is drawn from.

        Args:
            plan: with its drafts made.
            hidden_TD: float [T, D]: final hidden states, of every token if it reads them.
        """


class MadeDrafts:
    """The runner calls it, in every step.

    Args:
        proposer: makes the drafts.
        guess: draws them.
    """

    def __init__(self, proposer: Proposer, guess: Guess) -> None:
        self._proposer = proposer
        self._guess = guess
        self.reads_hidden = proposer.reads_hidden
        self.watch: Watch | None = None
        """Told the logits of every draft; set by who proves a proposer."""
        self.failure: str | None = None
        """Why no drafts are made any more; None: they are."""

    def follow(self, plan: StepPlan) -> None:
        """As Proposer; before the plan is filled."""
        self._guarded(lambda: self._proposer.follow(plan))

    def fill(self, plan: StepPlan) -> StepPlan:
        """A followed plan with its open drafts made. Waits for the device."""
        wanted = _open_drafts(plan)
        if not wanted:
            return plan
        made = self._guarded(lambda: _by_row(self._proposer.propose(plan, wanted, self._draw), wanted))
        token_ids = [FILLER if token_id == DRAFTED else token_id for token_id in plan.token_ids]
        for one, drafts in zip(wanted, made or [], strict=False):
            token_ids[one.at : one.at + one.count] = drafts
        return replace(plan, token_ids=token_ids)

    def note(self, plan: StepPlan, hidden_TD: Tensor) -> None:
        """As Proposer."""
        self._guarded(lambda: self._proposer.note(plan, hidden_TD))

    def _draw(self, logits_RV: Tensor, going: Sequence[OpenDrafts], depth: int) -> Tensor:
        if self.watch is not None:
            self.watch(logits_RV, going, depth)
        return self._guess.guess(logits_RV, [one.row for one in going], [one.step + depth for one in going])

    def _guarded(self, work: Callable[[], R]) -> R | None:
        if self.failure is not None:
            return None
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            _log.exception("%s failed", self._proposer.name)
            self.failure = f"{self._proposer.name} failed: {error}"
            return None


def _by_row(made: Sequence[Tensor], wanted: Sequence[OpenDrafts]) -> list[list[int]]:
    """The drafts of each row, read from the device at once."""
    told = iter(torch.cat(list(made)).tolist())
    by_depth = [[next(told) for _ in range(len(token_R))] for token_R in made]
    return [[by_depth[depth][r] for depth in range(one.count)] for r, one in enumerate(wanted)]


def _open_drafts(plan: StepPlan) -> list[OpenDrafts]:
    """The drafts that a plan leaves to the runner, by their number, most first."""
    if not plan.num_verifies or DRAFTED not in plan.token_ids:
        return []
    found: list[OpenDrafts] = []
    begin = 0
    for i, count in enumerate(plan.num_new):
        num_drafts = plan.num_draft[i]
        at = begin + count - num_drafts
        if num_drafts and plan.token_ids[at] == DRAFTED:
            found.append(OpenDrafts(plan.rows[i], at, num_drafts, plan.starts[i], plan.sample_steps[i]))
        begin += count
    return sorted(found, key=lambda one: -one.count)
