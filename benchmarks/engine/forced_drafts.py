"""What drafts by a model's own head cost and earn at a given rate of right ones, which a random model cannot reach.

    python -m benchmarks.random_model FOLDER --shape qwen3.5-4b --device cuda
    python -m benchmarks.engine.forced_drafts --model FOLDER --device cuda

A first run without speculation tells the answers. Then the head's logits are changed before a draft is drawn of them:
towards the token of that answer, or, with the rate's chance, by a draw keyed by request and place, towards a wrong one.
So the head computes all that it ever does, verification is what it ever is, and every answer must equal the first one.
Rows begin together; seconds and tokens are counted from the moment when every row has its first tokens until the first
row has its last. ``predicted`` are the same drafts, all of them right, from the answer as a predicted text: their steps
verify and draft nothing, so that the difference is what drafting costs.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks import lib
from benchmarks.engine.figures import prompt_ids
from troth import compose
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.events import Completed, Event, Failed, Segment
from troth.contracts.names import RequestId, Row
from troth.contracts.plan import StepPlan, StepResult
from troth.contracts.ports import PendingStep
from troth.contracts.progress import no_progress
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import Speculation
from troth.draft.made import MadeTerms
from troth.run.assemble import activate, load_runner, scheduler_limits
from troth.run.decode_steps import pipeline_depth
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.made_drafts import OpenDrafts
from troth.run.readback import to_device
from troth.run.runner import ModelRunner
from troth.schedule.scheduler import Scheduler

TESTS = ("tests/cpu/test_head_drafts.py", "tests/cpu/test_forced_drafts.py")
FIRST_TOKENS: Final = 12
"""Of each row, before anything is counted: captures are made by then."""


@dataclass(slots=True)
class Answer:
    """How far one request came."""

    num_tokens: int = 0
    end: Completed | Failed | None = None
    last_read: float = 0.0

    def offer(self, event: Event) -> bool:
        """As run.engine.Sink."""
        if isinstance(event, Segment):
            self.num_tokens = event.num_completion_tokens
        elif isinstance(event, Completed | Failed):
            self.end = event
        return True


@dataclass(slots=True)
class Noted:
    """A launched step whose tokens are kept."""

    plan: StepPlan
    step: PendingStep
    token_ids: dict[RequestId, list[int]]

    def result(self) -> StepResult:
        """As contracts.ports.PendingStep."""
        result = self.step.result()
        for request_id, token_ids in zip(self.plan.request_ids, result.token_ids, strict=True):
            self.token_ids[request_id] += token_ids
        return result


class Forced:
    """A StepRunner whose head drafts what it is told to."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._requests: dict[Row, RequestId] = {}
        self.told: dict[RequestId, list[int]] = {}
        """By request, the draft of each token of its answer."""
        self.token_ids: defaultdict[RequestId, list[int]] = defaultdict(list)
        """What was drawn for each request."""
        self.num_steps = 0
        runner.watch_drafts(self._force)

    def starts(self, plan: StepPlan) -> bool:
        """As contracts.ports.StepRunner."""
        return self._runner.starts(plan)

    def launch(self, plan: StepPlan) -> PendingStep:
        """As contracts.ports.StepRunner."""
        self.num_steps += 1
        self._requests = dict(zip(plan.rows, plan.request_ids, strict=True))
        return Noted(plan, self._runner.launch(plan), self.token_ids)

    def close(self) -> None:
        """As contracts.ports.StepRunner."""
        self._runner.close()

    def tell(self, answers: dict[RequestId, list[int]], rate: float) -> None:
        """Draft these answers, each token of them right with the chance ``rate``."""
        for request_id, token_ids in answers.items():
            draw = random.Random(f"{request_id} {rate}")
            drafts = [one if draw.random() < rate else (one + 7) % self._vocab_size for one in token_ids]
            self.told[request_id] = [*drafts, *[0] * 16]  # some are asked for behind an answer's end

    def _force(self, logits_RV: Tensor, wanted: Sequence[OpenDrafts], depth: int) -> None:
        token_ids = [self.told[self._requests[one.row]][one.step + depth] for one in wanted]
        told_R = to_device(torch.tensor(token_ids, dtype=torch.int64), logits_RV.device)
        logits_RV.scatter_(1, told_R.unsqueeze(1), torch.inf)


class Engine:
    """One that is stepped by hand."""

    def __init__(self, arguments: Any) -> None:
        model = ModelOptions(model=arguments.model, device=arguments.device, context_tokens=arguments.context)
        options = EngineOptions(speculation=("mtp",), speculate_uncertified=True, max_rows=max(arguments.rows))
        artifact = compose.find(model)
        planned = compose.plan(artifact, model, options)
        activate(planned)
        self.loaded = load_runner(planned, None, no_progress)
        runner = self.loaded.runner
        self.vocab_size = planned.recognised.config.vocab_size
        self.forced = Forced(runner, self.vocab_size)
        scheduler = Scheduler(scheduler_limits(self.loaded.planned))
        head = MadeTerms(refusal=None, failure=lambda: runner.made_drafts_failure)
        self.loop = EngineLoop(
            scheduler,
            self.forced,
            compose.load_text(artifact, model).tokenizer,
            clock=time.perf_counter,
            pipeline_depth=pipeline_depth(torch.device(planned.resolved.device)),
            drafting=Drafting(scheduler, time.perf_counter, made={"mtp": head}),
        )

    def serve(self, requests: Sequence[Request]) -> tuple[list[list[int]], float, float]:
        """The answers, tokens per second while all rows went on, and milliseconds of a step."""
        answers = [Answer() for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            self.loop.add(request, answer)
        self.forced.token_ids.clear()
        while min(answer.num_tokens for answer in answers) < FIRST_TOKENS:
            self.loop.step()
            _require_no_failure(answers)
        began, tokens, steps = time.perf_counter(), _count(answers), self.forced.num_steps
        while not any(answer.end for answer in answers):
            self.loop.step()
        seconds = time.perf_counter() - began
        speed, step_ms = (_count(answers) - tokens) / seconds, 1e3 * seconds / (self.forced.num_steps - steps)
        while self.loop.step():
            pass
        _require_no_failure(answers)
        token_ids = [self.forced.token_ids[one.request_id] for one in requests]
        return [ids[: answer.num_tokens] for ids, answer in zip(token_ids, answers, strict=True)], speed, step_ms


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--model", required=True, help="a folder with a draft head")
    parser.add_argument("--device", default=None)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    lib.gate(TESTS, arguments)
    engine = Engine(arguments)
    figures = {f"B{rows}": _batch(engine, rows, arguments) for rows in arguments.rows}
    downgrades = engine.loaded.runner.downgrades
    options = {name: getattr(arguments, name) for name in ("model", "device", "prompt", "tokens")}
    lib.finish("forced_drafts", lib.stamp(options) | {"figures": figures, "downgrades": downgrades}, arguments)
    engine.loop.close()


def _batch(engine: Engine, rows: int, arguments: Any) -> dict[str, dict[str, float]]:
    """Figures of so many rows, by way of drafting."""
    requests = [
        Request(
            request_id=RequestId(f"B{rows}-{number}"),
            prompt_ids=tuple(prompt_ids(arguments.prompt, engine.vocab_size)),
            max_tokens=arguments.tokens,
            sampling=SamplingParams(temperature=0.0),
            prompt_cache=False,
        )
        for number in range(rows)
    ]
    wanted, _, _ = engine.serve(requests)
    known = {one.request_id: token_ids for one, token_ids in zip(requests, wanted, strict=True)}
    steps_ms: dict[str, list[float]] = {}

    def measured(name: str, depth: int = 0, rate: float | None = None) -> float:
        way = Speculation()
        if rate is not None:
            engine.forced.tell(known, rate)
            way = Speculation(sources=("mtp",), depth=depth, adaptive=False)
        elif depth:
            way = Speculation(sources=("external",), depth=depth, adaptive=False, predicted_ids=(0,))
        asked = [replace(one, speculation=_predicting(way, known[one.request_id])) for one in requests]
        answers, speed, step_ms = engine.serve(asked)
        if answers != wanted:
            raise SystemExit(f"B{rows}, {name}: an answer differs from that without drafts")
        steps_ms.setdefault(name, []).append(step_ms)
        return speed

    ways: dict[str, tuple[int, float | None]] = {"off": (0, None)}
    for depth in arguments.depths:
        ways[f"depth {depth}, predicted"] = (depth, None)
        ways |= {f"depth {depth}, {rate:g} right": (depth, rate) for rate in arguments.rates}
    runs = {name: (lambda name=name, way=way: measured(name, *way)) for name, way in ways.items()}
    found: dict[str, dict[str, float]] = {}
    for name, series in lib.interleaved(runs, arguments.repetitions).items():
        depth, rate = ways[name]
        speed, step_ms = median(series), median(steps_ms[name][1:])
        found[name] = {"tokens_per_s": speed, "step_ms": step_ms}
        lib.line(f"B{rows}, {name}", speed, "tok/s", spread=series)
        if depth:
            plain = found["off"]
            found[name] |= {"ratio": speed / plain["tokens_per_s"], "verify_ms": step_ms}
            text = f"{found[name]['ratio']:.2f} times off; {step_ms:.2f} ms a step, off {plain['step_ms']:.2f}"
            if rate is not None:
                found[name]["draft_ms"] = step_ms - found[f"depth {depth}, predicted"]["step_ms"]
                found[name]["verify_ms"] -= found[name]["draft_ms"]
                text += f", {found[name]['draft_ms']:.2f} of them for drafting"
            print(f"    {text}", flush=True)
    return found


def _predicting(way: Speculation, answer: Sequence[int]) -> Speculation:
    return replace(way, predicted_ids=tuple(answer)) if way.predicted_ids else way


def _require_no_failure(answers: Sequence[Answer]) -> None:
    failed = next((answer.end for answer in answers if isinstance(answer.end, Failed)), None)
    if failed is not None:
        raise SystemExit(f"a request failed: {failed}")


def _count(answers: Sequence[Answer]) -> int:
    return sum(answer.num_tokens for answer in answers)


if __name__ == "__main__":
    main()
