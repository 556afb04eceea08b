"""The grammars of the rows in the batch: masks that take time are computed in threads, beside the forward pass.

    draw of step n -> token -> [thread: advance, mask, spread] ----.
                        |                                          v
                        `-> commit, emit, plan, forward of n+1 -> mask the logits -> draw of step n+1

Refuses to know what a grammar is (``text/grammar.py``) and how tokens are drawn (``sampler.py``). A row that loses its
place starts over from its output, and stands where it stood.
Legend: S sampled positions, G those with a mask, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from troth.contracts.names import Row
from troth.contracts.plan import NO_SAMPLE, ON_DEVICE, StepPlan, StepResult
from troth.contracts.request import Request
from troth.ops.mask import mask
from troth.run.draws import DrawPlaces
from troth.run.readback import NOT_FINITE, Readback, to_device
from troth.run.token_masks import TokenMask, advance, advance_verified, begin, differs, look_ahead, next_mask, resume
from troth.text.grammar import GrammarCompiler
from troth.text.grammar_session import GrammarSession

NUM_THREADS: Final = 2
"""One mask takes a tenth of a millisecond: two threads are ready before sixteen rows are, and leave the cores alone."""
CHEAP_S: Final = 100e-6
"""A mask that took less is computed at once the next time, where the token lies here: handing it to a thread costs the
engine's own more than that, in wake-ups and in turns at the interpreter."""
MAX_AT_ONCE: Final = 8
"""Rows whose masks are computed at once; with more of them the threads are the better place."""


@dataclass(slots=True)
class _Place:
    """One row's session, and the mask of its next draw under way. Only the thread at work on it changes the session."""

    num_prompt: int
    session: GrammarSession
    masked: Future[TokenMask | None]
    taking: Future[Any] | None
    """Done once the session has the tokens that it was last given, which a thread takes in; None: it has them."""
    is_cheap: bool = False
    """Whether the last mask was."""
    ahead: Future[list[TokenMask | None]] | None = None
    """The masks behind the drafts of the step under way, as far as the grammar lets these come."""


@dataclass(slots=True)
class GrammarStep:
    """What the grammars say about one step's draws; indices are into S."""

    ended: list[int] = field(default_factory=list)
    """Answers that were complete before the draw: what was drawn for them does not count."""
    faults: dict[int, str] = field(default_factory=dict)
    """Why no token could follow. What was drawn does not count either."""
    completing: dict[int, Future[bool]] = field(default_factory=dict)
    """Whether the drawn token makes the answer complete."""
    reaches: dict[int, int] = field(default_factory=dict)
    """First draw of a row with drafts -> how many of its draws were made under the right mask."""
    counts: dict[int, Future[int]] = field(default_factory=dict)
    """First draw of a row with drafts -> how many of its draws count."""

    def tell(self, result: StepResult, indices: Sequence[int]) -> None:
        """Write into a step's result; ``indices[s]`` is the plan index of draw ``s``. Waits for what is under way."""
        for s, count in self.counts.items():
            del result.token_ids[indices[s]][count.result() :]
        for s in self.ended:
            result.token_ids[indices[s]] = []
            result.ends.append(indices[s])
        for s, fault in self.faults.items():
            result.token_ids[indices[s]] = []
            result.dead_ends[indices[s]] = fault
        result.ends += [indices[s] for s, complete in self.completing.items() if complete.result()]


class RowGrammars:
    """Owns the sessions of constrained rows. One thread calls it.

    Args:
        compiler: for the model's tokenizer and vocabulary.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._places: dict[Row, _Place] = {}
        self._num_logits: int | None = None
        """Of a row, once it is known that logits lie in main memory."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="troth-masks")
        # Of their own: a slow compilation must not keep the rows of the batch waiting.
        self._compilations = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="troth-compilations")

    def prepare(self, request: Request) -> Future[object]:
        """Compile a request's grammar, so that admitting it costs no step any time. The future raises RequestError."""
        assert request.grammar is not None, request.request_id
        return self._compilations.submit(self._compiler.compile, request.grammar, continues_text=request.continues_text)

    def follow(self, plan: StepPlan) -> None:
        """Take in the rows a plan releases and admits, and the output tokens it feeds that nobody drew."""
        for row in plan.releases:
            self._places.pop(row, None)
        for admission in plan.admissions:
            if admission.request.grammar is not None:
                session = self._session(admission.request)
                masked = self._threads.submit(begin, session, admission.output_ids, self._num_logits)
                self._places[admission.row] = _Place(len(admission.request.prompt_ids), session, masked, taking=masked)
        if self._places:
            self._take_forced(plan)
            if plan.num_verifies:
                self._look_ahead(plan)

    def has_any(self, rows: Sequence[Row]) -> bool:
        """Whether one of these rows has a grammar."""
        return bool(self._places) and any(row in self._places for row in rows)

    def forced_ids(self, row: Row) -> list[int]:
        """The tokens that a row's grammar lets come next, and no others; waits for its mask."""
        place = self._places.get(row)
        if place is None:
            return []
        place.masked.result()
        return place.session.forced_ids()

    def mask(self, logits_SV: Tensor, draws: DrawPlaces) -> GrammarStep | None:
        """Take the logits of forbidden tokens away, in place. None: no row of the step has a grammar.

        Args:
            logits_SV: float32, penalised.
            draws: of the step.
        """
        places = [(s, self._places[draws.rows[s]]) for s in draws.firsts if draws.rows[s] in self._places]
        if not places:
            return None
        if logits_SV.device.type == "cpu":
            self._num_logits = logits_SV.shape[1]
        step = GrammarStep()
        bound: list[int] = []
        masks: list[bytes] = []
        for s, place in places:
            allowed = place.masked.result()
            place.is_cheap = allowed is None or allowed.cost_s < CHEAP_S
            ahead = [] if place.ahead is None else place.ahead.result()
            place.ahead = None
            if s in draws.drafts:
                step.reaches[s] = 1 + len(ahead)
            for at, one in enumerate([allowed, *ahead], s):
                if one is None or one.is_nothing:
                    continue
                if one.penalty_V is not None:
                    logits_SV[at].add_(one.penalty_V)
                    continue
                bound.append(at)
                masks.append(one.bits)
            if allowed is None or not allowed.is_nothing:
                continue
            if place.session.is_complete:
                step.ended.append(s)
            else:
                step.faults[s] = place.session.fault or "the grammar lets no token follow"
        if bound:
            allowed_GW = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.int32).view(len(bound), -1)
            mask(logits_SV, to_device(torch.tensor(bound), logits_SV.device), to_device(allowed_GW, logits_SV.device))
        return step

    def advance(self, step: GrammarStep, tokens: Readback, draws: DrawPlaces) -> None:
        """Start on the next masks of the rows that were drawn."""
        # Tokens that lie here already are taken in at once, in microseconds: handing them over would cost more.
        here = tokens.tokens() if tokens.is_here else None
        for s in draws.firsts:
            place = self._places.get(draws.rows[s])
            if place is None or s in step.ended or s in step.faults:
                continue
            if s in draws.drafts:
                self._advance_verified(step, tokens, s, draws.drafts[s], place)
                continue
            complete: Future[bool] = Future()
            step.completing[s] = place.taking = complete
            if here is None:
                place.masked = self._threads.submit(advance, place.session, tokens, s, complete, self._num_logits)
                continue
            if here[s] == NOT_FINITE:
                complete.set_result(False)
                continue
            place.session.advance(here[s])
            place.taking = None
            complete.set_result(place.session.is_complete)
            if place.is_cheap and len(self._places) <= MAX_AT_ONCE:
                place.masked = Future()
                place.masked.set_result(next_mask(place.session, self._num_logits))
            else:
                place.masked = self._threads.submit(next_mask, place.session, self._num_logits)

    def _advance_verified(
        self, step: GrammarStep, tokens: Readback, s: int, drafts: Sequence[int], place: _Place
    ) -> None:
        complete, count = step.completing[s], step.counts[s] = Future[bool](), Future[int]()
        place.taking = complete
        work = (place.session, tokens, s, drafts[: step.reaches[s] - 1], complete, count, self._num_logits)
        place.masked = self._threads.submit(advance_verified, *work)

    def _look_ahead(self, plan: StepPlan) -> None:
        """Start on the masks behind drafts."""
        for i in range(plan.num_decodes, plan.num_decodes + plan.num_verifies):
            place = self._places.get(plan.rows[i])
            if place is not None:
                drafts = plan.drafts_of(i)
                place.ahead = self._threads.submit(look_ahead, place.session, place.masked, drafts, self._num_logits)

    def close(self) -> None:
        """Let the threads go. Requests that wait for a compilation are not told."""
        self._places.clear()
        for threads in (self._threads, self._compilations):
            threads.shutdown(wait=False, cancel_futures=True)

    def _take_forced(self, plan: StepPlan) -> None:
        """Give sessions the tokens that a plan feeds although nobody drew them, such as a forced end of reasoning.

        They come after what was drawn, or instead of draws that were dropped.
        """
        end = 0
        for i, (row, start, num_new) in enumerate(zip(plan.rows, plan.starts, plan.num_new, strict=True)):
            end += num_new
            place = self._places.get(row)
            if place is None:
                continue
            num_drafts = plan.num_draft[i] if plan.num_verifies else 0
            num_new -= num_drafts
            first = max(0, start - place.num_prompt)
            num_output = max(0, start + num_new - place.num_prompt - first)
            fed = plan.token_ids[end - num_drafts - num_output : end - num_drafts]
            if ON_DEVICE in fed or not (fed or plan.sample_steps[i] != NO_SAMPLE):
                continue
            # What a thread is still taking in is compared by a thread, behind it.
            is_known = place.taking is None or place.taking.done()
            if is_known and not differs(place.session, first, fed, plan.sample_steps[i]):
                continue
            work = (place.session, place.masked, first, fed, plan.sample_steps[i], self._num_logits)
            place.masked = place.taking = self._threads.submit(resume, *work)

    def _session(self, request: Request) -> GrammarSession:
        assert request.grammar is not None, request.request_id
        compiled = self._compiler.compile(request.grammar, continues_text=request.continues_text)
        return compiled.session(request.eos_ids, request.grammar.begins_after)
