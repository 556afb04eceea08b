"""The laws every model family must obey, stated once.

Each takes a way to build an engine and a set of requests, and compares what the requests get in two ways of serving
them. Token ids must be equal, and with them texts, finish reasons and counts; log-probabilities may differ by float
order.

    batched = single         chunked = whole         preempted = uninterrupted         stream = whole
    prefix hit = cold        restored = cold         speculation on = off
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from troth.contracts.cache_spec import CacheSpec, attention_groups, recurrent_bytes
from troth.contracts.events import Completed, Event, Failed, Segment
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.plan import StepPlan
from troth.contracts.prefix_cache import DiskCacheStatus
from troth.contracts.request import Request
from troth.contracts.speculation import DraftSourceName, Speculation, SpeculationStats
from troth.run.draws import DrawPlaces
from troth.run.engine import EngineLoop
from troth.schedule import invariants
from troth.schedule.admission import SchedulerLimits
from troth.schedule.scheduler import Scheduler

LOGPROB_LIMIT = 2e-3
"""Sums in another order, through a few layers: far below what changes a token, far above what was seen (1e-5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How an engine is set up."""

    max_rows: int = 8
    chunk_tokens: int = 256
    step_tokens: int = 256
    num_blocks: int = 200
    """Blocks of every group's pool."""
    prompt_cache: bool = False
    num_checkpoints: int = 64
    """Of models with recurrent layers."""
    disk_folder: Path | None = None
    """Of the prompt cache's disk tier; None: there is none."""

    def limits(self, specs: tuple[CacheSpec, ...], context_tokens: int) -> SchedulerLimits:
        """What the scheduler of such an engine works with, over a model with these caches."""
        groups = attention_groups(specs)
        return SchedulerLimits(
            groups=groups,
            num_blocks=(self.num_blocks,) * len(groups),
            max_rows=self.max_rows,
            max_waiting=64,
            chunk_tokens=self.chunk_tokens,
            step_tokens=self.step_tokens,
            context_tokens=context_tokens,
            prompt_cache=self.prompt_cache,
            num_checkpoints=None if recurrent_bytes(specs) is None else self.num_checkpoints,
            checkpoint_interval_tokens=32,
        )


BuildEngine = Callable[[Serving], tuple[EngineLoop, Scheduler]]


@dataclass(slots=True)
class Answer:
    """What one request got."""

    token_ids: list[int]
    text: str
    logprobs: list[float]
    end: Completed


class Collector:
    """A consumer that always keeps up."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.last_read = 0.0

    def offer(self, event: Event) -> bool:
        self.events.append(event)
        return True

    def answer(self) -> Answer:
        end = self.events[-1]
        assert not isinstance(end, Failed), end
        assert isinstance(end, Completed)
        segments = [event for event in self.events if isinstance(event, Segment)]
        tokens = [token for segment in segments for token in segment.tokens]
        assert len(tokens) == end.usage.num_completion_tokens
        counts = [segment.num_completion_tokens for segment in segments]
        assert counts == sorted(counts), "the running count of tokens fell"
        logprobs = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
        return Answer([t.token_id for t in tokens], "".join(s.text for s in segments), logprobs, end)


def serve(
    build: BuildEngine, serving: Serving, requests: Sequence[Request], *, stagger: int = 0
) -> tuple[list[Answer], Scheduler]:
    """Serve the requests together, each arriving ``stagger`` steps after the one before; check the invariants."""
    loop, scheduler = build(serving)
    return serve_on(loop, scheduler, requests, stagger=stagger), scheduler


def serve_on(loop: EngineLoop, scheduler: Scheduler, requests: Sequence[Request], *, stagger: int = 0) -> list[Answer]:
    """As ``serve``, on an engine that may have served others before."""
    collectors = [Collector() for _ in requests]
    for request, collector in zip(requests, collectors, strict=True):
        loop.add(request, collector)
        for _ in range(stagger):
            loop.step()
            invariants.check(scheduler)
    while loop.step():
        invariants.check(scheduler)
    assert all(pool.num_used == 0 for pool in scheduler.pools), "blocks leaked"
    return [collector.answer() for collector in collectors]


def assert_same(left: Sequence[Answer], right: Sequence[Answer]) -> None:
    """Equal tokens, texts, reasons and counts, those of the cache aside; log-probabilities within LOGPROB_LIMIT."""
    for one, other in zip(left, right, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert one.end.finish_reason == other.end.finish_reason
        usage = replace(one.end.usage, num_cached_tokens=other.end.usage.num_cached_tokens)
        assert usage == other.end.usage
        difference = max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0)
        assert difference < LOGPROB_LIMIT, f"log-probabilities differ by {difference}"


def alone(build: BuildEngine, requests: Sequence[Request], serving: Serving | None = None) -> list[Answer]:
    """Each request served by itself."""
    return [serve(build, serving or Serving(), [request])[0][0] for request in requests]


def batched_equals_single(build: BuildEngine, requests: Sequence[Request]) -> None:
    """Neighbours change nothing, whether they arrive together or one by one."""
    singles = alone(build, requests)
    for stagger in (0, 2):
        assert_same(serve(build, Serving(), requests, stagger=stagger)[0], singles)
    assert_same(serve(build, Serving(max_rows=2), requests)[0], singles)


def chunked_equals_whole(build: BuildEngine, requests: Sequence[Request]) -> None:
    """The size of prompt chunks changes nothing."""
    whole = alone(build, requests)
    for chunk in (7, 16, 33):
        chunked = Serving(chunk_tokens=chunk, step_tokens=chunk)
        assert_same(serve(build, chunked, requests)[0], whole)


def preempted_equals_uninterrupted(build: BuildEngine, requests: Sequence[Request], serving: Serving) -> None:
    """Losing the cache and computing it again changes nothing; ``serving`` has too few blocks for all."""
    interrupted, scheduler = serve(build, serving, requests)
    assert scheduler.num_preemptions > 0, "the pool was too large to preempt anybody"
    assert_same(interrupted, alone(build, requests))


def stream_equals_whole(build: BuildEngine, requests: Sequence[Request], decode: Callable[[list[int]], str]) -> None:
    """The streamed text is the decoded answer up to its stop string, EOS left out."""
    for request, answer in zip(requests, alone(build, requests), strict=True):
        ids = [token_id for token_id in answer.token_ids if token_id not in request.eos_ids]
        text = decode(ids)
        if answer.end.stop_match is not None:
            assert answer.end.stop_match in request.stop
            text = text[: text.index(answer.end.stop_match)]
        assert answer.text == text
        unstopped = replace(request, stop=())
        if answer.end.stop_match is None:
            assert_same(alone(build, [unstopped]), [answer])


def prefix_hit_equals_cold(build: BuildEngine, requests: Sequence[Request], serving: Serving) -> None:
    """Second turns, retries, branches and cancelled requests, served from what others left, get what they got alone."""
    first = [replace(one, boundary=max(0, len(one.prompt_ids) - 3)) for one in requests]
    cold = alone(build, first)
    loop, scheduler = build(replace(serving, prompt_cache=True))
    assert_same(serve_on(loop, scheduler, first), cold)
    again = [replace(one, request_id=RequestId(f"{one.request_id}-again")) for one in first]
    second = [_next_turn(one, answer) for one, answer in zip(first, cold, strict=True)]
    branches = [_branch(one) for one in second]
    cold_second, cold_branches = alone(build, second), alone(build, branches)
    num_cached = 0
    for round_, stagger, wanted in (
        (again, 0, cold),
        (second, 3, cold_second),
        (branches, 0, cold_branches),
        (again, 2, cold),
    ):
        answers = serve_on(loop, scheduler, round_, stagger=stagger)
        assert_same(answers, wanted)
        for one, answer in zip(round_, answers, strict=True):
            assert answer.end.usage.num_cached_tokens % BLOCK_TOKENS == 0
            assert answer.end.usage.num_cached_tokens < len(one.prompt_ids)
            num_cached += answer.end.usage.num_cached_tokens
    assert num_cached, "nothing was served from the cache"
    _cancel_half_way(loop, scheduler, second)
    assert_same(serve_on(loop, scheduler, second), cold_second)
    off = [replace(one, prompt_cache=False) for one in again]
    answers = serve_on(loop, scheduler, off)
    assert_same(answers, cold)
    assert not any(answer.end.usage.num_cached_tokens for answer in answers)


def restored_equals_cold(build: BuildEngine, requests: Sequence[Request], serving: Serving) -> None:
    """After a restart, next turns, retries and branches served from disk get what they got alone."""
    first = [replace(one, boundary=max(0, len(one.prompt_ids) - 3)) for one in requests]
    cold = alone(build, first)
    second = [_next_turn(one, answer) for one, answer in zip(first, cold, strict=True)]
    branches = [_branch(one) for one in second]
    cold_second, cold_branches = alone(build, second), alone(build, branches)
    serving = replace(serving, prompt_cache=True)
    for round_, stagger, wanted in (
        (first, 0, cold),
        (second, 3, cold_second),
        (branches, 0, cold_branches),
        (second, 2, cold_second),
    ):
        loop, scheduler = build(serving)
        assert_same(serve_on(loop, scheduler, round_, stagger=stagger), wanted)
        num_restored = disk_status(loop).num_restored_tokens
        assert (num_restored == 0) == (round_ is first), f"{num_restored} tokens came back"
        loop.close()
        assert not disk_status(loop).trouble


def speculation_changes_nothing(
    build: BuildEngine, requests: Sequence[Request], serving: Serving, sources: tuple[DraftSourceName, ...], depth: int
) -> tuple[SpeculationStats, Scheduler]:
    """Whoever drafts, for all rows or every other one, in a new engine and from what it remembers: the same answers.

    Of several sources every third request leaves ``external`` out, which would seldom let those behind it draft.
    """
    off = alone(build, requests)
    stats, others = SpeculationStats(), tuple(name for name in sources if name != "external") or sources
    for stride, stagger in ((1, 0), (2, 1)):
        drafted = [
            replace(one, speculation=_drafted(one, answer, sources if number % 3 else others, depth))
            if number % stride == 0
            else one
            for number, (one, answer) in enumerate(zip(requests, off, strict=True))
        ]
        loop, scheduler = build(serving)
        for _ in range(2 if serving.prompt_cache else 1):
            answers = serve_on(loop, scheduler, drafted, stagger=stagger)
            assert_same(answers, off)
            for one, answer in zip(drafted, answers, strict=True):
                assert (answer.end.speculation is not None) == (one.speculation is not None)
        total = loop.status("ready", ()).speculation
        assert total is not None
        if stride == 1:
            stats = total
    return stats, scheduler


def speculation_changes_nothing_where_logits_are_equal(
    build: BuildEngine, requests: Sequence[Request], sources: tuple[DraftSourceName, ...], depth: int
) -> int:
    """In numbers of few bits drafts may change sums: wherever they did not, the same token is drawn.

    Every answer is followed to the first token that differs. Returns at how many tokens logits were equal.
    """
    off, off_draws = _noted_draws(build, requests)
    drafted = [
        replace(one, speculation=_drafted(one, answer, sources, depth))
        for one, answer in zip(requests, off, strict=True)
    ]
    on, on_draws = _noted_draws(build, drafted)
    num_equal = 0
    for one, left, right in zip(requests, off, on, strict=True):
        for step, (token, other) in enumerate(zip(left.token_ids, right.token_ids, strict=False)):
            is_equal = torch.equal(off_draws[one.request_id, step], on_draws[one.request_id, step])
            assert token == other or not is_equal, (one.request_id, step)
            num_equal += is_equal
            if token != other:
                break
    assert any(answer.end.speculation is not None and answer.end.speculation.num_accepted for answer in on)
    return num_equal


def _noted_draws(
    build: BuildEngine, requests: Sequence[Request]
) -> tuple[list[Answer], dict[tuple[RequestId, int], Tensor]]:
    """Answers, and the logits, float32 [V], that each token was drawn from; one that was drawn again has the last."""
    loop, scheduler = build(Serving())
    sampler: Any = loop._runner._sampler  # type: ignore[attr-defined]
    draw, noted = sampler.draw, dict[tuple[RequestId, int], Tensor]()

    def noting(logits_SV: Tensor, plan: StepPlan, places: DrawPlaces) -> Any:
        for logits_V, i, step in zip(logits_SV.clone(), places.indices, places.steps, strict=True):
            noted[plan.request_ids[i], step] = logits_V
        return draw(logits_SV, plan, places)

    sampler.draw = noting
    return serve_on(loop, scheduler, requests), noted


def _drafted(request: Request, answer: Answer, sources: tuple[DraftSourceName, ...], depth: int) -> Speculation:
    """Of the right answer every seventh token is predicted wrong, as is what follows its end."""
    usable = tuple(name for name in sources if name != "grammar" or request.grammar is not None)
    wrong = [token if i % 7 < 6 else (token + 1) % 100 for i, token in enumerate([*answer.token_ids, 5, 6, 7])]
    predicted = tuple(wrong) if "external" in usable else ()
    return Speculation(sources=usable, depth=depth, adaptive=False, predicted_ids=predicted)


def disk_status(loop: EngineLoop) -> DiskCacheStatus:
    """What an engine's disk tier tells."""
    status = loop.status("ready", ()).prefix_cache
    assert status is not None
    assert status.disk is not None
    return status.disk


def _next_turn(request: Request, answer: Answer) -> Request:
    said = [token for token in answer.token_ids if token not in request.eos_ids]
    prompt = (*request.prompt_ids, *said, 3, 1, 4, 1, 5)
    return replace(
        request, request_id=RequestId(f"{request.request_id}-2"), prompt_ids=prompt, boundary=len(prompt) - 2
    )


def _branch(request: Request) -> Request:
    """The same beginning, another end."""
    kept = request.prompt_ids[: len(request.prompt_ids) * 2 // 3]
    return replace(request, request_id=RequestId(f"{request.request_id}-b"), prompt_ids=(*kept, 2, 7, 1, 8))


def _cancel_half_way(loop: EngineLoop, scheduler: Scheduler, requests: Sequence[Request]) -> None:
    for number, request in enumerate(requests):
        one = replace(request, request_id=RequestId(f"{request.request_id}-c"))
        loop.add(one, Collector())
        for _ in range(1 + number % 4):
            loop.step()
        loop.cancel(one.request_id, "requested")
        invariants.check(scheduler)
