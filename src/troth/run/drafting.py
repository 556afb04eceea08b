"""The engine's side of speculation: asks the drafters of running requests before a step, tells them what became of it.

A row is drafted for when its last token is known. Where steps are launched ahead, a row that has drafts gives that up
for as long as it has some (``Scheduler.draft``). Does nothing while no request has a drafter.
Refuses to know sources (``draft/``) and how drafts are verified (``draws.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from troth.contracts.names import NO_ROW, RequestId, Row
from troth.contracts.plan import StepPlan
from troth.contracts.ports import Clock
from troth.contracts.request import Request
from troth.contracts.speculation import (
    DRAFT_SOURCES,
    DraftSource,
    DraftSourceName,
    Speculation,
    SpeculationStats,
)
from troth.draft.drafter import Drafter
from troth.draft.external import ExternalSource
from troth.draft.forced import GrammarSource
from troth.draft.made import NOTHING_MADE, MadeSource, MadeTerms
from troth.draft.ngram import NgramSource
from troth.draft.tally import DraftTally
from troth.draft.worth import Worth
from troth.errors import CapabilityUnavailable
from troth.schedule.request_state import RequestState
from troth.schedule.scheduler import RowOutcome, Scheduler


class Drafting:
    """Owns the drafters of the requests that have not ended. One thread calls it.

    Args:
        scheduler: gets the drafts.
        clock: seconds.
        default: for requests that say nothing; None: no drafts.
        forced_ids: what a row's grammar lets come next and nothing else; None: no request may have a grammar.
        made: what there is for sources whose drafts are made in the step; others have nothing.
        most: drafts of a row in one step, for requests that do not say; None: as many as each source may make.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        *,
        default: Speculation | None = None,
        forced_ids: Callable[[Row], Sequence[int]] | None = None,
        made: Mapping[DraftSourceName, MadeTerms] = NOTHING_MADE,
        most: int | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._default = default
        self._forced_ids = forced_ids
        self._made = {**NOTHING_MADE, **made}
        self._most = most
        # Looking drafts up costs next to nothing, making them is part of the step: their costs are not each other's.
        self._found_worth, self._made_worth = Worth(), Worth()
        self._worths: dict[DraftSourceName, Worth] = {
            name: self._made_worth if name in self._made else self._found_worth for name in DRAFT_SOURCES
        }
        self._drafters: dict[RequestId, Drafter] = {}
        self._num_drafting = 1
        """Rows that had drafts in the last step that had any."""
        self._began_s = 0.0
        """When the step under way began, or the one before it ended."""
        self._totals = DraftTally()

    def drafter(self, request: Request) -> Drafter | None:
        """What drafts for a request; None: it wants none.

        Raises:
            CapabilityUnavailable: a source it names cannot serve it.
        """
        wanted = request.speculation or self._default
        if wanted is None or not wanted.sources:
            return None
        if wanted.depth is None:
            wanted = replace(wanted, depth=self._most)
        named = request.speculation is not None and not request.speculation.predicted_ids
        sources: list[DraftSource] = []
        for name in (name for name in DRAFT_SOURCES if name in wanted.sources):
            refusal = self._why_not(name, request, wanted)
            if refusal is None:
                sources.append(self._source(name, request, wanted))
            elif named:
                raise CapabilityUnavailable(f"speculation {name}", refusal, param="speculation")
        return Drafter(wanted, sources, self._worths, self._made)

    def begin(self, request_id: RequestId, drafter: Drafter) -> None:
        """Draft for a request that the scheduler took, until it ends."""
        self._drafters[request_id] = drafter

    def end(self, request_id: RequestId) -> SpeculationStats | None:
        """Let a request go; what became of its drafts, if it was to have any."""
        drafter = self._drafters.pop(request_id, None)
        return None if drafter is None else drafter.stats()

    def totals(self) -> SpeculationStats:
        """What became of all drafts."""
        return replace(self._totals.stats(), uncertified=any(terms.uncertified for terms in self._made.values()))

    @property
    def is_split(self) -> bool:
        """Whether some rows with drafts are under way while others could go: once together, they take one step."""
        states = (self._scheduler.state_of(name) for name, drafter in self._drafters.items() if drafter.joined)
        under_way = [state.num_pending > 0 for state in states if state is not None and _goes_on(state)]
        return any(under_way) and not all(under_way)

    def propose(self, *, is_idle: bool) -> None:
        """Make drafts for the step to be planned; ``is_idle``: none is under way."""
        if not self._drafters:
            return
        if is_idle:
            self._began_s = self._clock()
        num_rows = max(1, self._scheduler.num_running)
        num_drafting = 0
        for request_id, drafter in self._drafters.items():
            state = self._scheduler.state_of(request_id)
            if drafter.is_idle or state is None or not _goes_on(state) or (drafter.joined and state.num_pending):
                continue
            drafts = drafter.propose(state.token_ids, state.num_prompt, num_rows, self._num_drafting)
            if drafts or drafter.joined:
                drafter.joined = bool(drafts)
                usable = () if state.num_pending else drafts
                self._scheduler.draft(request_id, usable if drafts else None)
            num_drafting += bool(drafts)
        self._num_drafting = num_drafting or self._num_drafting

    def note(self, plan: StepPlan, outcomes: Sequence[RowOutcome]) -> None:
        """Take in a step that was committed."""
        if not self._drafters:
            return
        ended_s = self._clock()
        seconds, self._began_s = ended_s - self._began_s, ended_s
        num_accepted, names = 0, set[DraftSourceName]()
        for outcome in outcomes:
            drafter = self._drafters.get(outcome.request_id)
            if outcome.num_drafted and drafter is not None:
                source = drafter.note(outcome.num_drafted, outcome.num_accepted)
                self._totals.note(source, outcome.num_drafted, outcome.num_accepted)
                num_accepted += outcome.num_accepted
                names.add(source)
        num_rows = plan.num_decodes + plan.num_verifies
        if num_rows == len(plan.rows):
            # A step of both kinds costs what the dearer one does.
            both = (self._found_worth, self._made_worth)
            for worth in both if not names else both[1:] if names & self._made.keys() else both[:1]:
                worth.note_step(num_rows, plan.num_exact - num_rows, num_accepted, seconds)

    def _why_not(self, name: DraftSourceName, request: Request, wanted: Speculation) -> str | None:
        if name == "grammar" and request.grammar is None:
            return "the request has no grammar"
        if name == "external" and not wanted.predicted_ids:
            return "the request predicts no text"
        if name in self._made:
            return self._made[name].refusal or self._made[name].failure()
        return None

    def _source(self, name: DraftSourceName, request: Request, wanted: Speculation) -> DraftSource:
        if name == "external":
            return ExternalSource(wanted.predicted_ids)
        if name == "grammar":
            return GrammarSource(partial(self._forced, request.request_id))
        if name in self._made:
            return MadeSource(name, self._made[name])
        return NgramSource()

    def _forced(self, request_id: RequestId) -> Sequence[int]:
        state = self._scheduler.state_of(request_id)
        if state is None or state.row == NO_ROW or state.num_pending or self._forced_ids is None:
            return ()
        return self._forced_ids(state.row)


def _goes_on(state: RequestState) -> bool:
    """Whether a row's next step feeds the last token of its answer."""
    return state.row != NO_ROW and not state.held and state.num_output > 0 and state.gap <= 1
