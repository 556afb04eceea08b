"""Several tokens from one step, through the whole engine: whatever ends or cuts an answer does so at the same token."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.portable.test_scheduler import FULL, limits
from troth.contracts.answer import AnswerReading
from troth.contracts.events import Completed, Event, Failed, Segment
from troth.contracts.names import RequestId
from troth.contracts.plan import NO_SAMPLE, StepPlan, StepResult
from troth.contracts.request import Request
from troth.contracts.speculation import DraftSourceName, Speculation
from troth.draft.made import MadeTerms
from troth.errors import RequestError
from troth.run.drafting import Drafting
from troth.run.draws import confirmed
from troth.run.engine import EngineLoop
from troth.schedule import invariants
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import EOS_ID, ByteTokenizer
from troth.testing.fake_runner import FakeRunner

CLOSE = tuple(b"</think>")
SAID = b"<think>one two three four</think>five six seven eight"


class Said:
    """A step that was computed at once."""

    def __init__(self, answer: StepResult) -> None:
        self._answer = answer

    def result(self) -> StepResult:
        return self._answer


class Reciter(FakeRunner):
    """Says the same text to everybody, a byte at a time: the s-th draw is its s-th byte, then EOS."""

    def launch(self, plan: StepPlan) -> Any:
        self.num_steps += 1
        result = StepResult(plan.step_id, [[] for _ in plan.rows])
        for i, step in enumerate(plan.sample_steps):
            if step != NO_SAMPLE:
                drafts = plan.drafts_of(i) if plan.num_verifies else []
                said = [SAID[at] if at < len(SAID) else EOS_ID for at in range(step, step + len(drafts) + 1)]
                result.token_ids[i] = said[: confirmed(said, drafts)]
        return Said(result)


class Sink:
    """Takes every event."""

    last_read = 0.0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def offer(self, event: Event) -> bool:
        self.events.append(event)
        return True

    def seen(self) -> tuple[Any, ...]:
        end = self.events[-1]
        assert isinstance(end, Completed), end
        texts = {
            kind: "".join(one.text for one in self.events if isinstance(one, Segment) and one.kind == kind)
            for kind in ("text", "reasoning")
        }
        return texts, end.finish_reason, end.usage, end.stop_match, end.unclosed_reasoning


def served(request: Request, depth: int = 0, **drafting: Any) -> tuple[Sink, int]:
    """The events of one request, and the steps it took."""
    scheduler = Scheduler(limits(groups=(FULL,), num_blocks=(64,), prompt_cache=True))
    runner, ticks = Reciter((FULL,), (64,)), count()

    def clock() -> float:
        return float(next(ticks))

    loop = EngineLoop(
        scheduler,
        runner,
        ByteTokenizer(),
        clock=clock,
        pipeline_depth=depth,
        drafting=Drafting(scheduler, clock, **drafting),
    )
    sink = Sink()
    loop.add(request, sink)
    while loop.step():
        invariants.check(scheduler)
    assert scheduler.is_idle
    return sink, runner.num_steps


READINGS = {
    "whole": AnswerReading(reasoning="think", close_ids=CLOSE),
    "budget 5": AnswerReading(reasoning="think", reasoning_budget=5, close_ids=CLOSE),
    "budget 0": AnswerReading(reasoning="think", reasoning_budget=0, close_ids=CLOSE),
    "none": None,
}


@pytest.mark.parametrize("pipeline", [0, 1])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("stop", [(), ("ix",), ("wo", "eve")])
@pytest.mark.parametrize("max_tokens", [7, 12, 14, 33, 200])
def test_drafts_end_answers_where_they_end_without(
    pipeline: int, reading: str, stop: tuple[str, ...], max_tokens: int
) -> None:
    plain = Request(
        request_id=RequestId("r"),
        prompt_ids=(65,) * 20,
        max_tokens=max_tokens,
        eos_ids=frozenset({EOS_ID}),
        stop=stop,
        reading=READINGS[reading],
    )
    wanted, num_steps = served(plain, pipeline)
    for depth in (1, 3, 8):
        drafted = Speculation(sources=("external",), depth=depth, adaptive=False, predicted_ids=(*SAID, EOS_ID, 5))
        sink, num_fewer = served(replace(plain, speculation=drafted), pipeline)
        assert sink.seen() == wanted.seen()
        end = sink.events[-1]
        assert isinstance(end, Completed)
        assert end.speculation is not None
        assert end.speculation.num_accepted > 0
        assert num_fewer < num_steps


@pytest.mark.parametrize("apart", [1, 2, 3, 4])
@pytest.mark.parametrize("beside", [False, True])
def test_rows_with_drafts_go_in_one_step_whenever_they_began(apart: int, beside: bool) -> None:
    """Apart, in turns, each group would read all weights for itself; a row without drafts is launched ahead as ever."""
    scheduler = Scheduler(limits(groups=(FULL,), num_blocks=(64,)))
    runner, plans = Reciter((FULL,), (64,)), list[StepPlan]()
    launch = runner.launch

    def noted(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    runner.launch = noted  # type: ignore[method-assign]
    drafting = Drafting(scheduler, lambda: 0.0)
    loop = EngineLoop(scheduler, runner, ByteTokenizer(), clock=lambda: 0.0, pipeline_depth=1, drafting=drafting)
    way = Speculation(sources=("external",), depth=1, adaptive=False, predicted_ids=(*SAID, EOS_ID))
    for number, speculation in enumerate((way, None, way) if beside else (way, way)):
        name = RequestId(f"r{number}")
        loop.add(Request(request_id=name, prompt_ids=(65,) * 20, max_tokens=50, speculation=speculation), Sink())
        for _ in range(apart):
            loop.step()
    while loop.step():
        pass
    verifies = [plan.num_verifies for plan in plans if plan.num_verifies]
    both = verifies.index(2)
    last = len(verifies) - 1 - verifies[::-1].index(2)
    assert set(verifies[both : last + 1]) == {2}
    assert last - both >= 12
    began = plans.index(next(plan for plan in plans if plan.num_verifies == 2))
    alone = any(plan.num_decodes == 1 and not plan.num_verifies for plan in plans[began : began + 5])
    assert alone == beside, "the row without drafts goes on while the others are judged"


def test_scheduler_hears_of_a_cut_before_the_end_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop string came in the same step as the last token of ``max_tokens``: what is behind it was never said."""
    cuts: list[int | None] = []
    finish = Scheduler.finish

    def noted(self: Scheduler, request_id: RequestId, *, num_emitted: int | None = None) -> bool:
        cuts.append(num_emitted)
        assert finish(self, request_id, num_emitted=num_emitted), "it had ended already"
        return True

    monkeypatch.setattr(Scheduler, "finish", noted)
    drafted = Speculation(sources=("external",), adaptive=False, predicted_ids=tuple(SAID))
    request = Request(
        request_id=RequestId("r"), prompt_ids=(65,) * 20, max_tokens=16, stop=("wo",), speculation=drafted
    )
    sink, _ = served(request)
    assert sink.seen()[1] == "stop"
    assert cuts == [14]


@pytest.mark.parametrize("speculation", [None, Speculation(sources=("external",), depth=8, predicted_ids=tuple(SAID))])
def test_token_at_which_a_consumer_ends_is_not_committed(speculation: Speculation | None) -> None:
    """It was a draft, so the step that accepted it had fed it: its block must not be offered all the same."""
    scheduler = Scheduler(limits(groups=(FULL,), num_blocks=(64,), prompt_cache=True))
    ticks = count()
    loop = EngineLoop(
        scheduler,
        Reciter((FULL,), (64,)),
        ByteTokenizer(),
        clock=lambda: float(next(ticks)),
        drafting=Drafting(scheduler, lambda: float(next(ticks))),
    )
    drafted = replace(speculation, adaptive=False) if speculation is not None else None
    # Twenty tokens and twelve, the last of which completes the second block.
    request = Request(
        request_id=RequestId("r"), prompt_ids=(65,) * 20, max_tokens=40, stop=("e t",), speculation=drafted
    )
    sink = Sink()
    loop.add(request, sink)
    while loop.step():
        invariants.check(scheduler)
    assert sink.seen()[2].num_completion_tokens == 12
    assert scheduler.prefix_index is not None
    assert len(scheduler.prefix_index.chain("", [65] * 20 + list(SAID[:12]))) == 1


def test_stats_count_rounds_drafts_and_what_was_accepted() -> None:
    request = Request(request_id=RequestId("r"), prompt_ids=(65,) * 20, max_tokens=20)
    wrong = bytearray(SAID)
    wrong[10] = 0
    drafted = Speculation(sources=("external",), depth=4, adaptive=False, predicted_ids=tuple(wrong))
    sink, num_steps = served(replace(request, speculation=drafted))
    end = sink.events[-1]
    assert isinstance(end, Completed)
    stats = end.speculation
    assert stats is not None
    # 0 behind the prompt; 1-4 and 5; 6-9 and 10, which was predicted wrong; 11 and 12, while "e " and " t" are mistaken
    # for later ones; 13-16 and 17; 18 and 19.
    assert num_steps == 7
    assert stats.num_verifies == 6
    assert (stats.num_drafted, stats.num_accepted) == (4 + 4 + 4 + 4 + 4 + 1, 4 + 4 + 0 + 0 + 4 + 1)
    assert stats.accepted_by_depth == (1, 0, 0, 3)
    assert stats.num_drafted_by_source == {"external": 21}
    assert stats.num_accepted_by_source == {"external": 13}
    assert stats.disabled_reason is None


@pytest.mark.parametrize(("depth", "longest"), [(None, 3), (8, 8), (2, 2)])
def test_requests_that_name_no_depth_get_as_many_drafts_as_the_engine_has_steps_for(
    depth: int | None, longest: int
) -> None:
    plain = Request(request_id=RequestId("r"), prompt_ids=(65,) * 20, max_tokens=40)
    drafted = Speculation(sources=("external",), depth=depth, adaptive=False, predicted_ids=tuple(SAID))
    for named in (True, False):
        asked = replace(plain, speculation=drafted) if named else plain
        sink, _ = served(asked, most=3, default=drafted)
        end = sink.events[-1]
        assert isinstance(end, Completed)
        assert end.speculation is not None
        assert len(end.speculation.accepted_by_depth) == longest


def test_totals_say_that_a_head_without_a_certificate_is_loaded() -> None:
    scheduler = Scheduler(limits(groups=(FULL,), num_blocks=(64,), prompt_cache=True))
    for uncertified in (False, True):
        made: dict[DraftSourceName, MadeTerms] = {"mtp": MadeTerms(refusal=None, uncertified=uncertified)}
        assert Drafting(scheduler, lambda: 0.0, made=made).totals().uncertified is uncertified


def test_nothing_is_drafted_for_requests_that_do_not_ask() -> None:
    plain = Request(request_id=RequestId("r"), prompt_ids=(65,) * 20, max_tokens=20)
    sink, _ = served(plain)
    end = sink.events[-1]
    assert isinstance(end, Completed)
    assert end.speculation is None
    by_default, _ = served(plain, default=Speculation(sources=("ngram",)))
    off, _ = served(replace(plain, speculation=Speculation()), default=Speculation(sources=("ngram",)))
    ends = [sink.events[-1] for sink in (by_default, off)]
    assert [isinstance(end, Completed) and end.speculation is not None for end in ends] == [True, False]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (Speculation(sources=("grammar",)), "no grammar"),
        (Speculation(sources=("external",)), "predicts no text"),
    ],
)
def test_a_source_that_cannot_serve_is_refused_by_name(wanted: Speculation, reason: str) -> None:
    request = Request(request_id=RequestId("r"), prompt_ids=(65,), max_tokens=3, speculation=wanted)
    sink, _ = served(request)
    failed = sink.events[-1]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == ("capability_unavailable", "speculation")
    assert reason in failed.message


@pytest.mark.parametrize(
    "values",
    [{"sources": ("oracle",)}, {"sources": "ngram"}, {"sources": ("ngram",), "depth": 0}, {"predicted_ids": (1,)}],
)
def test_speculation_refuses_what_no_engine_knows(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        Speculation(**values)
    assert refused.value.param == "speculation"
