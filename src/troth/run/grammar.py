"""The grammars of the rows in the batch: masks are computed in threads of their own, beside the forward pass.

    draw of step n -> token -> [thread: advance, mask] ------------.
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
from typing import Final

import torch
from torch import Tensor

from troth.contracts.names import Row
from troth.contracts.plan import ON_DEVICE, StepPlan, StepResult
from troth.contracts.request import Request
from troth.ops.mask import mask
from troth.text.grammar import GrammarCompiler
from troth.text.grammar_session import GrammarSession

NUM_THREADS: Final = 2
"""One mask takes a tenth of a millisecond: two threads are ready before sixteen rows are, and leave the cores alone."""


@dataclass(slots=True)
class _Place:
    """One row's session, and the mask of its next draw under way. Only the thread at work on it changes the session."""

    num_prompt: int
    session: GrammarSession
    masked: Future[bytes | None]


@dataclass(slots=True)
class GrammarStep:
    """What the grammars say about one step's draws; indices are into S."""

    ended: list[int] = field(default_factory=list)
    """Answers that were complete before the draw: what was drawn for them does not count."""
    faults: dict[int, str] = field(default_factory=dict)
    """Why no token could follow. What was drawn does not count either."""
    completing: dict[int, Future[bool]] = field(default_factory=dict)
    """Whether the drawn token makes the answer complete."""

    def tell(self, result: StepResult, indices: Sequence[int]) -> None:
        """Write into a step's result; ``indices[s]`` is the plan index of draw ``s``. Waits for what is under way."""
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
                masked = self._threads.submit(_begin, session, admission.output_ids)
                self._places[admission.row] = _Place(len(admission.request.prompt_ids), session, masked)
        if self._places:
            self._take_forced(plan)

    def mask(self, logits_SV: Tensor, rows: Sequence[Row]) -> GrammarStep | None:
        """Take the logits of forbidden tokens away, in place. None: no row of the step has a grammar.

        Args:
            logits_SV: float32, penalised.
            rows: of each sampled position.
        """
        places = [(s, self._places[row]) for s, row in enumerate(rows) if row in self._places]
        if not places:
            return None
        step = GrammarStep()
        bound: list[int] = []
        masks: list[bytes] = []
        for s, place in places:
            allowed = place.masked.result()
            if allowed is None:
                continue
            if allowed != bytes(len(allowed)):
                bound.append(s)
                masks.append(allowed)
            elif place.session.is_complete:
                step.ended.append(s)
            else:
                step.faults[s] = place.session.fault or "the grammar lets no token follow"
        if bound:
            allowed_GW = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.int32).view(len(bound), -1)
            mask(logits_SV, torch.tensor(bound, device=logits_SV.device), allowed_GW.to(logits_SV.device))
        return step

    def advance(self, step: GrammarStep, token_S: Tensor, rows: Sequence[Row]) -> None:
        """Start on the next masks of the rows that were drawn."""
        # Tokens that lie here already are taken in at once, in microseconds: handing them over would cost more.
        here = token_S.tolist() if token_S.device.type == "cpu" else None
        for s, row in enumerate(rows):
            place = self._places.get(row)
            if place is None or s in step.ended or s in step.faults:
                continue
            complete: Future[bool] = Future()
            step.completing[s] = complete
            if here is None:
                place.masked = self._threads.submit(_advance, place.session, token_S, s, complete)
                continue
            place.session.advance(here[s])
            complete.set_result(place.session.is_complete)
            place.masked = self._threads.submit(place.session.mask)

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
        for row, start, num_new in zip(plan.rows, plan.starts, plan.num_new, strict=True):
            end += num_new
            place = self._places.get(row)
            if place is None:
                continue
            first = max(0, start - place.num_prompt)
            num_output = max(0, start + num_new - place.num_prompt - first)
            fed = plan.token_ids[end - num_output : end]
            known = place.session.token_ids[first : first + num_output]
            if ON_DEVICE not in fed and fed != known:
                place.masked = self._threads.submit(_resume, place.session, place.masked, first, fed)

    def _session(self, request: Request) -> GrammarSession:
        assert request.grammar is not None, request.request_id
        compiled = self._compiler.compile(request.grammar, continues_text=request.continues_text)
        return compiled.session(request.eos_ids, request.grammar.begins_after)


def _begin(session: GrammarSession, output_ids: Sequence[int]) -> bytes | None:
    for token_id in output_ids:
        session.advance(token_id)
    return session.mask()


def _resume(
    session: GrammarSession, under_way: Future[bytes | None], first: int, token_ids: Sequence[int]
) -> bytes | None:
    """Make these the output tokens from the ``first`` on, once the work under way is done: it was queued earlier."""
    under_way.result()
    kept = session.token_ids[first:]
    same = 0
    while same < min(len(kept), len(token_ids)) and kept[same] == token_ids[same]:
        same += 1
    session.rollback(len(kept) - same)
    return _begin(session, token_ids[same:])


def _advance(session: GrammarSession, token_S: Tensor, s: int, complete: Future[bool]) -> bytes | None:
    """Take in a token that may still be on its way from the device; first tell whether the answer is complete."""
    try:
        session.advance(int(token_S[s]))
        complete.set_result(session.is_complete)
    # The edge of a thread: the step's result must not wait for an answer for ever.
    except BaseException as error:
        complete.set_exception(error)
        raise
    return session.mask()
