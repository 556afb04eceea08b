"""Proves a draft head by running it: what ``troth certify`` does before it writes a certificate.

    plain      the logits of every draft that was looked at are those of a plain computation of the head
    on = off   answers drafted for are those without drafts, alone and together, greedy and sampled
    resumed    the same again, from prefixes that the prompt cache served

Where two choices are closer than rounding, either counts. Refuses to know where certificates lie
(``certificate.py``) and how prompts are made. Next: ``models/plain_head.py``.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from troth.contracts.events import Completed, Event, Failed, Segment, TokenText
from troth.contracts.failures import error_from_event
from troth.contracts.names import RequestId, Row
from troth.contracts.plan import StepPlan
from troth.contracts.ports import PendingStep
from troth.contracts.progress import LoadProgress
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import Speculation
from troth.draft.made import MadeTerms
from troth.draft.tally import DraftTally
from troth.models.hybrid_config import HybridConfig
from troth.models.plain_head import PlainHead
from troth.ops.layer_kv import dtype_of
from troth.run.assemble import Loaded, activate, load_runner, scheduler_limits
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.lone_prompt import LonePrompt
from troth.run.made_drafts import OpenDrafts
from troth.run.planned import Planned, require_fit
from troth.run.runner import ModelRunner
from troth.schedule.scheduler import Scheduler
from troth.text.detokenize import TokenBytes
from troth.weights.source import WeightSource

ANSWER_TOKENS: Final = 48
DEPTH: Final = 3
GREEDY: Final = "greedy"
LOOKED_AT: Final = 12
"""Steps of each greedy answer whose drafts are computed plainly, too, which takes a whole sequence each..."""
LOOKED_AT_EVERY: Final = 2
"""...and which of them."""
ROUNDING: Final[dict[str, float]] = {"float32": 1e-2, "float16": 0.1, "bfloat16": 0.5, "int8": 0.5, "fp8": 1.0}
"""Two logits this close are the same to a model that computes, or caches, in such numbers."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """What came out."""

    num_prompts: int
    num_tokens: int = 0
    """Of answers that were drafted for."""
    num_cached_tokens: int = 0
    """Prompt tokens that the second time came from the prompt cache."""
    depth: int = DEPTH
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    num_compared: int = 0
    """Drafts that were computed plainly, too."""
    largest_difference: float = 0.0
    """Of a logit of those."""
    num_ties: int = 0
    """Differences that rounding explains, of drafts and of tokens."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """What was not as it must be; none: the head is proved."""

    def as_dict(self) -> dict[str, Any]:
        """For the certificate."""
        return dataclasses.asdict(self)


@dataclass(slots=True)
class _Answer:
    request: Request
    tokens: list[TokenText] = field(default_factory=list)
    end: Completed | Failed | None = None
    last_read: float = 0.0

    def offer(self, event: Event) -> bool:
        """As run.engine.Sink."""
        if isinstance(event, Segment):
            self.tokens += event.tokens
        elif isinstance(event, Completed | Failed):
            self.end = event
        return True

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    def gap_at(self, index: int) -> float:
        """By how much the best token was better than the second best, in log-probability."""
        logprobs = self.tokens[index].logprobs
        best = logprobs.top_logprobs if logprobs is not None else []
        return best[0] - best[1] if len(best) > 1 else float("inf")


class _Watched:
    """A runner of whose greedy rows some drafts are noted, with their logits."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.looks: dict[tuple[RequestId, int], list[Tensor]] = {}
        """Request and position of its last known token -> logits of each draft behind that, float32 [V]."""
        self._requests: dict[Row, RequestId] = {}
        self._num_steps: Counter[RequestId] = Counter()
        runner.watch_drafts(self._note)

    def starts(self, plan: StepPlan) -> bool:
        """As contracts.ports.StepRunner."""
        return self.runner.starts(plan)

    def launch(self, plan: StepPlan) -> PendingStep:
        """As contracts.ports.StepRunner."""
        self._requests = dict(zip(plan.rows, plan.request_ids, strict=True))
        return self.runner.launch(plan)

    def close(self) -> None:
        """As contracts.ports.StepRunner."""
        self.runner.close()

    def forget(self) -> None:
        """Begin anew."""
        self.looks.clear()
        self._num_steps.clear()

    def _note(self, logits_RV: Tensor, wanted: Sequence[OpenDrafts], depth: int) -> None:
        for logits_V, one in zip(logits_RV, wanted, strict=True):
            request_id = self._requests[one.row]
            if not request_id.startswith(GREEDY):
                continue  # drafted with noise: not the likeliest one
            self._num_steps[request_id] += depth == 0
            number = self._num_steps[request_id] - 1
            if number % LOOKED_AT_EVERY == 0 and number < LOOKED_AT * LOOKED_AT_EVERY:
                self.looks.setdefault((request_id, one.position), []).append(logits_V.float().cpu().clone())


def certify_head(
    planned: Planned, tokenizer: TokenBytes, prompts: Sequence[Sequence[int]], progress: LoadProgress
) -> Findings:
    """Load a model with its draft head and prove the head on some prompts.

    Args:
        planned: with the head.
        tokenizer: of the model.
        prompts: token ids, longer than two blocks.
        progress: told how far loading and proving are.

    Raises:
        ModelLoadError, OutOfMemory, OptionError: as ``assemble.assemble``.
        TrothError: what ended an answer.
    """
    began = time.monotonic()
    require_fit(planned)
    activate(planned)
    loaded = load_runner(planned, None, progress)
    trial = _Trial(loaded, tokenizer, progress)
    findings = Findings(num_prompts=len(prompts))
    requests = [
        Request(
            request_id=RequestId(f"{kind}-{number}"),
            prompt_ids=tuple(prompt),
            max_tokens=ANSWER_TOKENS,
            sampling=SamplingParams(temperature=temperature, seed=number, logprobs=2),
        )
        for kind, temperature in ((GREEDY, 0.0), ("sampled", 1.0))
        for number, prompt in enumerate(prompts)
    ]
    off = trial.serve("without drafts", requests, Speculation())
    drafting = Speculation(sources=("mtp",), depth=DEPTH, adaptive=False)
    tolerance = max(ROUNDING[planned.resolved.dtype], ROUNDING[planned.resolved.kv_dtype])
    for way, together in (("together", True), ("alone, from the prompt cache", False)):
        trial.runner.forget()
        on = trial.serve(f"with drafts, {way}", requests, drafting, together=together)
        _compare_answers(off, on, way, tolerance, findings)
        _compare_drafts(trial, on, way, tolerance, findings)
        findings.num_cached_tokens = sum(
            one.end.usage.num_cached_tokens for one in on if isinstance(one.end, Completed)
        )
    if not findings.num_cached_tokens:
        findings.problems.append("nothing was served by the prompt cache")
    _count(trial, findings)
    trial.close()
    findings.seconds = round(time.monotonic() - began, 3)
    return findings


class _Trial:
    """One engine that is stepped by hand."""

    def __init__(self, loaded: Loaded, tokenizer: TokenBytes, progress: LoadProgress) -> None:
        self.loaded = loaded
        self.runner = _Watched(loaded.runner)
        self.progress = progress
        scheduler = Scheduler(scheduler_limits(loaded.planned))
        head = MadeTerms(refusal=None, failure=lambda: loaded.runner.made_drafts_failure)
        self.loop = EngineLoop(
            scheduler,
            self.runner,
            tokenizer,
            clock=time.monotonic,
            drafting=Drafting(scheduler, time.monotonic, made={"mtp": head}),
        )

    def serve(
        self, stage: str, requests: Sequence[Request], speculation: Speculation, *, together: bool = True
    ) -> list[_Answer]:
        """The answers, in order. Raises TrothError: what ended one of them."""
        answers = [_Answer(dataclasses.replace(one, speculation=speculation)) for one in requests]
        for done, answer in enumerate(answers):
            self.progress(stage, done, len(answers))
            # Without drafts nothing is remembered, so that what is drafted for is computed once.
            self.loop.add(dataclasses.replace(answer.request, prompt_cache=bool(speculation.sources)), answer)
            while not together and self.loop.step():
                pass
        while self.loop.step():
            pass
        self.progress(stage, len(answers), len(answers))
        for answer in answers:
            if isinstance(answer.end, Failed):
                raise error_from_event(answer.end)
        return answers

    @torch.inference_mode()
    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Final hidden states of a whole sequence fed at once, in caches of its own, float [T, D]."""
        planned = self.loaded.planned
        device, kv_dtype = torch.device(planned.resolved.device), dtype_of(planned.resolved.kv_dtype)
        return LonePrompt(self.loaded.model, planned.specs, token_ids, kv_dtype=kv_dtype, device=device).hidden()

    def close(self) -> None:
        """Give the memory back."""
        self.loop.close()


def _compare_answers(
    off: Sequence[_Answer], on: Sequence[_Answer], way: str, tolerance: float, findings: Findings
) -> None:
    for plain, drafted in zip(off, on, strict=True):
        findings.num_tokens += len(drafted.tokens)
        wanted, got = plain.token_ids, drafted.token_ids
        if wanted == got:
            continue
        at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
        greedy = plain.request.sampling.is_greedy
        if tolerance > ROUNDING["float32"] and (not greedy or (at < len(wanted) and plain.gap_at(at) < tolerance)):
            findings.num_ties += 1
            continue
        findings.problems.append(
            f"{plain.request.request_id}, {way}: token {at} of the answer differs from that without"
        )


def _compare_drafts(trial: _Trial, answers: Sequence[_Answer], way: str, tolerance: float, findings: Findings) -> None:
    recognised = trial.loaded.planned.recognised
    assert isinstance(recognised.config, HybridConfig), "no other family has a draft head"
    known = {one.request.request_id: [*one.request.prompt_ids, *one.token_ids] for one in answers}
    source = WeightSource(recognised.artifact)
    head = PlainHead(recognised.config, source, max(map(len, known.values())) + DEPTH)
    hidden: dict[RequestId, Tensor] = {}
    for number, ((request_id, position), drafted) in enumerate(trial.runner.looks.items()):
        trial.progress(f"plain computation, {way}", number, len(trial.runner.looks))
        tokens = known[request_id]
        if position >= len(tokens):
            continue  # its consumer never saw that far
        if request_id not in hidden:
            hidden[request_id] = trial.hidden(tokens)
        wanted = head.drafts(tokens[: position + 1], hidden[request_id][:position], len(drafted))
        for depth, (got_V, wanted_V) in enumerate(zip(drafted, wanted, strict=True), start=1):
            findings.num_compared += 1
            difference = float((got_V - wanted_V).abs().max())
            findings.largest_difference = max(findings.largest_difference, difference)
            # Not a number is no small difference either.
            if not difference <= tolerance:
                place = f"{request_id}, {way}, behind token {position}"
                findings.problems.append(
                    f"{place}: logits of draft {depth} are {difference:.3g} off those computed plainly"
                )
                break
            if int(got_V.argmax()) != int(wanted_V.argmax()):
                findings.num_ties += 1
                break  # what follows was drafted behind another token


def _count(trial: _Trial, findings: Findings) -> None:
    stats = trial.loop.status("ready", ()).speculation or DraftTally().stats()
    findings.num_drafted, findings.num_accepted = stats.num_drafted, stats.num_accepted
    findings.accepted_by_depth = stats.accepted_by_depth
    if stats.num_drafted == 0:
        findings.problems.append("nothing was drafted")
    if trial.loaded.runner.made_drafts_failure is not None:
        findings.problems.append(trial.loaded.runner.made_drafts_failure)
