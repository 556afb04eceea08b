"""The drafts of one request: which source is asked, how many it may make, what became of them.

Refuses to know rows and steps (``run/drafting.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from troth.contracts.speculation import MAX_DRAFTS, DraftSource, DraftSourceName, Speculation, SpeculationStats
from troth.draft.made import NOTHING_MADE, MadeTerms
from troth.draft.tally import DraftTally
from troth.draft.worth import Chance, Worth


class Drafter:
    """Owns the sources of one request.

    Args:
        wanted: what the request says.
        sources: those it may use, in the order in which they are asked.
        worths: of the engine, by source.
        made: what the engine has for the sources whose drafts are made in the step.
    """

    def __init__(
        self,
        wanted: Speculation,
        sources: Sequence[DraftSource],
        worths: Mapping[DraftSourceName, Worth],
        made: Mapping[DraftSourceName, MadeTerms] = NOTHING_MADE,
    ) -> None:
        self._wanted = wanted
        self._sources = sources
        self._worths = worths
        self._made = [made[one.name] for one in sources if one.name in made]
        self._chances: dict[DraftSourceName, Chance] = {one.name: worths[one.name].chance(one.name) for one in sources}
        self._tally = DraftTally()
        self._asked: DraftSourceName | None = None
        """Whose drafts were proposed last."""
        self._rests = False
        """Whether the last drafts were left out because they would not pay."""
        self.joined = False
        """Whether the row waits for its commits."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing will ever be drafted."""
        return not self._sources

    def propose(self, token_ids: Sequence[int], num_prompt: int, num_rows: int, num_drafting: int) -> Sequence[int]:
        """The drafts for the next step; none where nobody knows any, or they would not pay.

        Args:
            token_ids: prompt and answer.
            num_prompt: how many of them are the prompt.
            num_rows: rows of the step.
            num_drafting: how many of them have drafts, about.
        """
        for source in self._sources:
            most = min(self._wanted.depth or MAX_DRAFTS[source.name], MAX_DRAFTS[source.name])
            drafts = source.propose(token_ids, num_prompt, most)
            if drafts and self._wanted.adaptive:
                chance, worth = self._chances[source.name], self._worths[source.name]
                drafts = drafts[: worth.depth(chance, len(drafts), num_rows, num_drafting)]
                self._rests = not drafts
            if drafts:
                self._asked = source.name
                return drafts
        return ()

    def note(self, num_drafted: int, num_accepted: int) -> DraftSourceName:
        """Take in what became of the last drafts; whose they were."""
        source = self._asked
        assert source is not None, "nothing was proposed"
        self._tally.note(source, num_drafted, num_accepted)
        self._chances[source].note(num_drafted, num_accepted)
        self._worths[source].note_verify(source, num_drafted, num_accepted)
        return source

    def stats(self) -> SpeculationStats:
        """What became of all of them."""
        failures = [failure for failure in (terms.failure() for terms in self._made) if failure is not None]
        done = self._tally.stats(failures[0] if failures else self._why_resting())
        return replace(done, uncertified=any(terms.uncertified for terms in self._made))

    def _why_resting(self) -> str | None:
        if not self._rests:
            return None
        done = self._tally.stats()
        if not done.num_drafted:
            return "drafts were not worth their cost"
        return f"drafts cost more than they saved: {done.num_accepted} of {done.num_drafted} were right"
