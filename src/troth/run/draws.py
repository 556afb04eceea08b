"""Where a step draws tokens, and for whom; and which drafts the draws confirm.

A row draws once, behind its last token; a row with drafts also behind each of those, with the key of the token it will
have been. A draft counts while the row's own draw in its place equals it: speculation changes no token.
Refuses to know how a draw is made (``sampler.py``). Legend: S draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from troth.contracts.names import Row
from troth.contracts.plan import NO_SAMPLE, StepPlan


@dataclass(slots=True)
class DrawPlaces:
    """The draws of one step, in the order of their logits: those of one row lie together."""

    indices: list[int]
    """[S]: the row's index in the plan."""
    rows: list[Row]
    """[S]."""
    steps: list[int]
    """[S]: which output token is drawn."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """First draw of a row with drafts -> its drafts; as many draws follow it."""

    @property
    def firsts(self) -> Sequence[int]:
        """The first draw of every row."""
        if not self.drafts:
            return range(len(self.rows))
        firsts, s = list[int](), 0
        while s < len(self.rows):
            firsts.append(s)
            s += 1 + len(self.drafts.get(s, ()))
        return firsts


def draw_places(plan: StepPlan) -> DrawPlaces:
    """The draws of a plan."""
    indices = [i for i, step in enumerate(plan.sample_steps) if step != NO_SAMPLE]
    if not plan.num_verifies:
        return DrawPlaces(indices, [plan.rows[i] for i in indices], [plan.sample_steps[i] for i in indices])
    places = DrawPlaces([], [], [])
    for i in indices:
        num_drafts = plan.num_draft[i]
        if num_drafts:
            places.drafts[len(places.rows)] = plan.drafts_of(i)
        for count in range(num_drafts + 1):
            places.indices.append(i)
            places.rows.append(plan.rows[i])
            places.steps.append(plan.sample_steps[i] + count)
    return places


def drawn_tokens(plan: StepPlan) -> list[int]:
    """Index into the step's tokens of each one behind which is drawn, [S]."""
    if not plan.num_verifies:
        ends = accumulate(plan.num_new)
        return [end - 1 for end, step in zip(ends, plan.sample_steps, strict=True) if step != NO_SAMPLE]
    drawn, end = list[int](), 0
    for count, num_drafts, step in zip(plan.num_new, plan.num_draft, plan.sample_steps, strict=True):
        end += count
        if step != NO_SAMPLE:
            drawn += range(end - 1 - num_drafts, end)
    return drawn


def confirmed(token_ids: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of a row's draws count: those at drafts that they equal, and the first that they do not."""
    count = 0
    while count < len(drafts) and token_ids[count] == drafts[count]:
        count += 1
    return count + 1
