"""Grammars in the batch: where the mask stands among the sampler's steps, how answers end, and dead ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from troth.contracts.answer import AnswerReading
from troth.contracts.events import Completed, Event, Failed, Segment
from troth.contracts.grammar import Grammar
from troth.contracts.names import RequestId, Row
from troth.contracts.plan import NO_SAMPLE, Admission, StepPlan, StepResult
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.run.draws import draw_places
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.readback import Readback
from troth.run.sampler import Sampler
from troth.schedule.admission import SchedulerLimits
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import EOS_ID, ByteTokenizer
from troth.text.grammar import GrammarCompiler

VOCAB = ByteTokenizer.vocab_size
COMPILER = GrammarCompiler(ByteTokenizer(), VOCAB)
Logits = Callable[[Request, int], Tensor]


class LogitsRunner:
    """A StepRunner over the real sampler and grammars; logits come from a function of request and step."""

    def __init__(self, grammars: RowGrammars, logits: Logits) -> None:
        self._grammars = grammars
        self._sampler = Sampler(grammars)
        self._logits = logits
        self._requests: dict[int, Request] = {}
        self.num_steps = 0

    def starts(self, plan: StepPlan) -> bool:
        return True

    def launch(self, plan: StepPlan) -> Any:
        self.num_steps += 1
        self._requests |= {admission.row: admission.request for admission in plan.admissions}
        self._sampler.follow(plan)
        indices = [i for i, step in enumerate(plan.sample_steps) if step != NO_SAMPLE]
        logits_SV = torch.stack([self._logits(self._requests[plan.rows[i]], plan.sample_steps[i]) for i in indices])
        sampled = self._sampler.draw(logits_SV, plan)
        result = StepResult(plan.step_id, [[] for _ in plan.rows])
        for s, i in enumerate(indices):
            result.token_ids[i] = [int(sampled.token_S[s])]
            if s in sampled.logprobs:
                result.logprobs[i] = [sampled.logprobs[s]]
        if sampled.grammar is not None:
            sampled.grammar.tell(result, indices)
        step: Future[StepResult] = Future()
        step.set_result(result)
        return step

    def close(self) -> None:
        self._grammars.close()


class Collector:
    """A consumer that always keeps up."""

    last_read = 0.0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def offer(self, event: Event) -> bool:
        self.events.append(event)
        return True

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Segment))


def favour(*favourites: int) -> Logits:
    """Logits that like these tokens best, in order, and the others the less the larger they are."""

    def logits(request: Request, step: int) -> Tensor:
        scores = -torch.arange(VOCAB, dtype=torch.float32) / 100
        for rank, token_id in enumerate(favourites):
            scores[token_id] = 9.0 - rank
        return scores

    return logits


def request(grammar: Grammar | None, name: str = "r", **fields: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, **fields.pop("sampling", {})})
    values: dict[str, Any] = {"prompt_ids": (65,), "max_tokens": 20, "eos_ids": frozenset({EOS_ID})}
    return Request(request_id=RequestId(name), grammar=grammar, sampling=sampling, **values | fields)


def loop_over(logits: Logits, grammars: RowGrammars | None = None) -> tuple[EngineLoop, LogitsRunner]:
    grammars = grammars or RowGrammars(COMPILER)
    limits = SchedulerLimits(
        groups=(), num_blocks=(), max_rows=4, max_waiting=8, chunk_tokens=64, step_tokens=64, context_tokens=256
    )
    ticks = count()
    runner = LogitsRunner(grammars, logits)
    loop = EngineLoop(Scheduler(limits), runner, ByteTokenizer(), clock=lambda: float(next(ticks)), grammars=grammars)
    return loop, runner


def answers(logits: Logits, *requests: Request) -> list[Collector]:
    loop, _ = loop_over(logits)
    collectors = [Collector() for _ in requests]
    for one, collector in zip(requests, collectors, strict=True):
        loop.add(one, collector)
    while loop.step():
        pass
    return collectors


def answer(logits: Logits, one: Request) -> tuple[str, Completed]:
    (collector,) = answers(logits, one)
    end = collector.events[-1]
    assert isinstance(end, Completed), end
    return collector.text, end


def test_answer_ends_at_once_where_nothing_can_follow() -> None:
    """Without a step, and a token, for the end."""
    loop, runner = loop_over(favour(EOS_ID, ord("b")))
    collector = Collector()
    loop.add(request(Grammar(kind="choice", choices=("ab",))), collector)
    while loop.step():
        pass
    end = collector.events[-1]
    assert isinstance(end, Completed)
    assert (collector.text, end.finish_reason, end.usage.num_completion_tokens) == ("ab", "stop", 2)
    assert runner.num_steps == 2


def test_answer_may_end_where_the_grammar_is_satisfied() -> None:
    text, end = answer(favour(EOS_ID, ord("a")), request(Grammar(kind="regex", source="a{3,}")))
    assert (text, end.finish_reason, end.usage.num_completion_tokens) == ("aaa", "stop", 4)


def test_answer_that_ignores_eos_goes_on_while_the_grammar_lets_it() -> None:
    grammar = Grammar(kind="regex", source="a{3,6}")
    text, end = answer(favour(EOS_ID, ord("a")), request(grammar, eos_ids=frozenset()))
    assert (text, end.finish_reason) == ("aaaaaa", "stop")


def test_answer_that_completes_at_its_last_token_has_stopped() -> None:
    grammar = Grammar(kind="choice", choices=("abc",))
    assert answer(favour(), request(grammar, max_tokens=3))[1].finish_reason == "stop"
    text, end = answer(favour(), request(grammar, max_tokens=2))
    assert (text, end.finish_reason) == ("ab", "length")


def test_stop_string_cuts_a_constrained_answer() -> None:
    text, end = answer(favour(), request(Grammar(kind="choice", choices=("abcdef",)), stop=("cd",)))
    assert (text, end.finish_reason, end.stop_match) == ("ab", "stop", "cd")


def test_answer_that_is_complete_before_its_first_token_is_empty() -> None:
    text, end = answer(favour(), request(Grammar(kind="regex", source="(?:)"), eos_ids=frozenset()))
    assert (text, end.finish_reason, end.usage.num_completion_tokens) == ("", "stop", 0)


def test_dead_end_fails_its_request_and_no_other() -> None:
    """The request calls an ordinary token an end, so that the grammar cannot go on through it."""
    dead = request(Grammar(kind="choice", choices=("ab",)), "dead", eos_ids=frozenset({ord("b")}))
    alive = request(Grammar(kind="choice", choices=("abc",)), "alive")
    failed, whole = answers(favour(), dead, alive)
    end = failed.events[-1]
    assert isinstance(end, Failed)
    assert (end.kind, end.code, end.param) == ("RequestError", "grammar_dead_end", "grammar")
    assert end.message.endswith("after 1 token")
    assert whole.text == "abc"


def test_log_probabilities_are_of_what_the_grammar_leaves() -> None:
    """Semantics D1: penalties and bias, then the mask, then log-probabilities, then temperature."""
    grammar = Grammar(kind="regex", source="[ab]c")
    wishes = {"logprobs": 4, "temperature": 5.0, "seed": 1, "logit_bias": ((ord("b"), 1.0), (ord("z"), 100.0))}
    (collector,) = answers(favour(), request(grammar, sampling=wishes))
    first, second = (t.logprobs for e in collector.events if isinstance(e, Segment) for t in e.tokens)
    assert first is not None
    assert second is not None
    expected = torch.tensor([0.0, 1.0 - 0.01]).log_softmax(0).tolist()
    assert first.top_ids == [ord("b"), ord("a")]
    assert first.top_logprobs == pytest.approx(expected[::-1], abs=1e-5)
    assert (second.token_id, second.rank, second.top_ids) == (ord("c"), 1, [ord("c")])
    assert second.logprob == pytest.approx(0.0, abs=1e-6)


def test_rows_without_a_grammar_draw_as_without_neighbours() -> None:
    wishes = {"temperature": 1.0, "seed": 7}
    alone = answers(favour(), request(None, sampling=wishes))[0].text
    beside = answers(
        favour(), request(Grammar(kind="json_object"), "json", sampling=wishes), request(None, sampling=wishes)
    )
    assert beside[1].text == alone


def test_grammar_begins_after_its_marker_and_is_replayed_with_it() -> None:
    grammar = Grammar(kind="regex", source="[0-9]{3}", begins_after=".")

    def logits(one: Request, step: int) -> Tensor:
        return favour(ord("x") if step < 4 else ord("."))(one, step)

    text, end = answer(logits, request(grammar))
    assert (text, end.finish_reason) == ("xxxx.000", "stop")


def test_grammar_takes_in_tokens_that_were_forced() -> None:
    """Such as the mark that a budget puts at the end of reasoning: nobody drew it, the next step feeds it."""
    loop, _ = loop_over(favour(ord("x")))
    collector = Collector()
    loop.add(request(Grammar(kind="regex", source="[0-9]{3}", begins_after=".")), collector)
    while collector.text != "xx":
        assert loop.step()
    loop._scheduler.force(RequestId("r"), [ord(".")])
    while loop.step():
        pass
    assert collector.text == "xx000"


def test_grammar_takes_back_draws_that_were_dropped() -> None:
    grammars = RowGrammars(COMPILER)
    one = request(Grammar(kind="regex", source="(ab|cd)e"))
    first = StepPlan(0, admissions=[Admission(Row(0), one, [], 0)])
    first.rows, first.starts, first.num_new, first.sample_steps, first.token_ids = [Row(0)], [0], [1], [0], [65]
    grammars.follow(first)
    step = grammars.mask(torch.zeros(1, VOCAB), draw_places(first))
    assert step is not None
    grammars.advance(step, Readback(torch.tensor([ord("a")]), torch.tensor([True])), draw_places(first))
    second = StepPlan(1)
    second.rows, second.starts, second.num_new, second.sample_steps = [Row(0)], [1], [2], [2]
    second.token_ids = [ord("c"), ord("d")]
    grammars.follow(second)
    logits = torch.zeros(1, VOCAB)
    grammars.mask(logits, draw_places(second))
    assert logits[0].isfinite().nonzero().flatten().tolist() == [ord("e")]
    grammars.close()


def test_grammar_of_a_row_that_starts_over_in_parts_keeps_its_place() -> None:
    """However far the threads are meanwhile: what a part is compared with may not be taken in yet."""
    grammars = RowGrammars(COMPILER)

    def hold() -> threading.Event:
        free = threading.Event()
        for _ in range(2):
            grammars._threads.submit(free.wait, 30)
        return free

    one, output = request(Grammar(kind="regex", source="(ab|cd)(ef|gh)i")), list(b"cdgh")
    first_part, begun = hold(), StepPlan(0, admissions=[Admission(Row(0), one, output, 0)])
    grammars.follow(begun)
    begin = grammars._places[Row(0)].masked
    behind = hold()
    parts = [StepPlan(1), StepPlan(2)]
    for part, start, token_ids, sample_step in zip(
        parts, (0, 3), ([65, *output[:2]], output[2:]), (NO_SAMPLE, 4), strict=True
    ):
        part.rows, part.starts, part.num_new, part.token_ids = [Row(0)], [start], [len(token_ids)], token_ids
        part.sample_steps = [sample_step]
    grammars.follow(parts[0])
    first_part.set()
    begin.result(30)
    grammars.follow(parts[1])
    behind.set()
    logits = torch.zeros(1, VOCAB)
    grammars.mask(logits, draw_places(parts[1]))
    assert logits[0].isfinite().nonzero().flatten().tolist() == [ord("i")]
    grammars.close()


class HeldCompiler(GrammarCompiler):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(ByteTokenizer(), VOCAB)
        self.go = threading.Event()

    def compile(self, *args: Any, **fields: Any) -> Any:
        assert self.go.wait(30)
        return super().compile(*args, **fields)


def test_other_requests_run_while_a_grammar_is_compiled() -> None:
    compiler = HeldCompiler()
    loop, _ = loop_over(favour(), RowGrammars(compiler))
    slow, plain, cancelled = Collector(), Collector(), Collector()
    loop.add(request(Grammar(kind="choice", choices=("ab",)), "slow"), slow)
    loop.add(request(Grammar(kind="choice", choices=("cd",)), "gone"), cancelled)
    loop.add(request(None, "plain", max_tokens=5), plain)
    while not plain.events or not isinstance(plain.events[-1], Completed):
        assert loop.step()
    loop.has_room(RequestId("slow"))
    loop.cancel(RequestId("gone"), "requested")
    assert loop.step(), "a compilation under way is something to do"
    assert not any(isinstance(event, Segment) for event in slow.events)
    compiler.go.set()
    while loop.step():
        pass
    assert slow.text == "ab"
    ends = [collector.events[-1] for collector in (slow, cancelled)]
    assert [end.finish_reason for end in ends if isinstance(end, Completed)] == ["stop", "aborted"]


def test_grammar_that_cannot_be_compiled_fails_its_request() -> None:
    bad, good = answers(favour(), request(Grammar(kind="regex", source="(a"), "bad"), request(None, "good"))
    end = bad.events[-1]
    assert isinstance(end, Failed)
    assert (end.kind, end.code, end.param) == ("RequestError", "invalid_grammar", "grammar")
    assert isinstance(good.events[-1], Completed)


def test_engine_without_grammars_refuses_them_by_name() -> None:
    loop, runner = loop_over(favour())
    plain = EngineLoop(Scheduler(loop._scheduler.limits), runner, ByteTokenizer(), clock=lambda: 0.0)
    collector = Collector()
    plain.add(request(Grammar(kind="json_object")), collector)
    end = collector.events[-1]
    assert isinstance(end, Failed)
    assert (end.kind, end.param) == ("CapabilityUnavailable", "grammar")


def test_grammar_hears_of_tokens_that_were_forced() -> None:
    """The end of reasoning, after its budget: nobody drew it, and the grammar begins behind it."""
    reading = AnswerReading(reasoning="think", prompt_tail="<think>", reasoning_budget=2, close_ids=tuple(b"</think>"))
    grammar = Grammar(kind="regex", source="yes|no", begins_after="</think>")
    (collector,) = answers(favour(ord("x")), request(grammar, reading=reading))
    said = [(event.kind, event.text) for event in collector.events if isinstance(event, Segment)]
    assert "".join(text for kind, text in said if kind == "reasoning") == "xx"
    assert "".join(text for kind, text in said if kind == "text") == "no"
    assert isinstance(collector.events[-1], Completed)
    assert collector.events[-1].finish_reason == "stop"
