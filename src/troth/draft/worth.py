"""Whether drafts pay, and how many: measured acceptance against measured cost, with a bound on what trying may cost.

Steps are paid in seconds. Drafts spend what a step costs more for them and earn the steps that accepted ones save; what
they may spend on top of what they earned is a hundredth of the time. So an engine with speculation is never much
slower than one without: it stops drafting, and tries again as that hundredth allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from troth.contracts.speculation import DraftSourceName
from troth.draft.step_costs import StepCosts

ALLOWANCE: Final = 0.01
"""Share of the time that drafts which do not pay may cost."""
MAX_DEBT_STEPS: Final = 2.0
"""Steps that a source may be behind before it rests, and..."""
MAX_CREDIT_STEPS: Final = 4.0
"""...steps it may be ahead, for later trials. No debt is larger: one step may have been slow by accident."""
WORTHWHILE: Final = 1.02
"""Expected speed over that without drafts below which none are made."""
FIRST_CHANCES: Final[Mapping[DraftSourceName, float]] = {
    "grammar": 0.95,
    "external": 0.8,
    "ngram": 0.6,
    "mtp": 0.8,
    "draft": 0.7,
}
"""How likely a draft is right before any was made."""
WEIGHT: Final = 4.0
"""Drafts that what is known of other requests counts for in a new one."""
FADING: Final = 0.97
"""What a step before counts, over the last one."""
LEARNING: Final = 0.05
"""Share of one step in what is remembered for other requests."""


class Chance:
    """How likely the drafts of one source are right, for one request."""

    def __init__(self, known: float) -> None:
        self._known = known
        self._hits = self._tries = 0.0

    @property
    def value(self) -> float:
        """Of one draft, if those before it were right."""
        return (self._hits + self._known * WEIGHT) / (self._tries + WEIGHT)

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Take in one step that verified drafts."""
        self._hits = self._hits * FADING + num_accepted
        self._tries = self._tries * FADING + num_accepted + (num_accepted < num_drafted)


class Worth:
    """What the drafts of one engine cost and earned. Decides for each row how many to make."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._chances: dict[DraftSourceName, float] = dict(FIRST_CHANCES)
        self._credit_s = 0.0

    def chance(self, source: DraftSourceName) -> Chance:
        """Of a new request."""
        return Chance(self._chances[source])

    def depth(self, chance: Chance, most: int, num_rows: int, num_drafting: int) -> int:
        """How many drafts a row should have, up to ``most``.

        Args:
            chance: of each one.
            most: at least 1.
            num_rows: rows of the step.
            num_drafting: how many of them have drafts, about.
        """
        plain_s = self.costs.plain_s(num_rows)
        if plain_s is None or self._credit_s < -MAX_DEBT_STEPS * plain_s:
            return 0
        best, best_speed, expected, likely = 0, WORTHWHILE, 0.0, 1.0
        # Costs are felt out: no step has more than twice the drafts that one was seen to have.
        known = max(1, self.costs.most_drafts(num_rows) // max(1, num_drafting))
        for depth in range(1, min(most, 2 * known) + 1):
            likely *= chance.value
            expected += likely
            speed = (1 + num_drafting * expected / num_rows) / self.costs.ratio(num_rows, num_drafting * depth)
            if speed > best_speed:
                best, best_speed = depth, speed
        if best == 0:
            # What a step cost once may be wrong, and is only found out by paying for another.
            price = min(2 * (self.costs.ratio(num_rows, 1) - 1), 0.9 * MAX_CREDIT_STEPS)
            return int(self._credit_s > price * plain_s)
        return best

    def note_step(self, num_rows: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Take in one step that only continued answers."""
        self.costs.note(num_rows, num_drafts, seconds)
        plain_s = self.costs.plain_s(num_rows)
        if plain_s is None:
            return
        earned = ALLOWANCE + num_accepted / num_rows
        spent = self.costs.ratio(num_rows, num_drafts) - 1 if num_drafts else 0.0
        most_s = MAX_CREDIT_STEPS * plain_s
        self._credit_s = max(-most_s, min(most_s, self._credit_s + (earned - spent) * plain_s))

    def note_verify(self, source: DraftSourceName, num_drafted: int, num_accepted: int) -> None:
        """Remember it for requests to come."""
        tries = num_accepted + (num_accepted < num_drafted)
        self._chances[source] += LEARNING * (num_accepted / tries - self._chances[source])
