"""Record every call into a scheduler, and prove that the same calls give the same plans.

A trace is JSON lines: one header with the limits, then one line per call with its arguments and, for ``plan``, what
came back. ``replay`` drives a fresh scheduler through it and stops at the first difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from troth.contracts.answer import AnswerReading
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.grammar import Grammar
from troth.contracts.names import RequestId
from troth.contracts.plan import StepPlan, StepResult, TokenLogprobs
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.errors import Busy, RequestError
from troth.schedule.admission import SchedulerLimits
from troth.schedule.reservations import Reservation
from troth.schedule.scheduler import RowOutcome, Scheduler


class RecordingScheduler(Scheduler):
    """A scheduler that writes each call to ``write_line``."""

    def __init__(self, limits: SchedulerLimits, write_line: Callable[[str], None]) -> None:
        super().__init__(limits)
        self._write = write_line
        self._log("limits", asdict(limits))

    def _log(self, call: str, argument: object, answer: object = None) -> None:
        self._write(json.dumps([call, argument, answer], separators=(",", ":"), sort_keys=True))

    def add(self, request: Request) -> int:
        """As Scheduler.add; a refusal is recorded too."""
        try:
            max_tokens = super().add(request)
        except (RequestError, Busy) as error:
            self._log("add", _request_to_json(request), type(error).__name__)
            raise
        self._log("add", _request_to_json(request), max_tokens)
        return max_tokens

    def finish(self, request_id: RequestId, *, num_emitted: int | None = None) -> bool:
        """As Scheduler.finish."""
        known = super().finish(request_id, num_emitted=num_emitted)
        self._log("finish", [request_id, num_emitted], known)
        return known

    def force(self, request_id: RequestId, token_ids: Sequence[int], *, num_emitted: int | None = None) -> None:
        """As Scheduler.force."""
        super().force(request_id, token_ids, num_emitted=num_emitted)
        self._log("force", [request_id, list(token_ids), num_emitted])

    def draft(self, request_id: RequestId, token_ids: Sequence[int] | None) -> None:
        """As Scheduler.draft."""
        super().draft(request_id, token_ids)
        self._log("draft", [request_id, None if token_ids is None else list(token_ids)])

    def hold(self, request_id: RequestId, held: bool) -> None:
        """As Scheduler.hold."""
        super().hold(request_id, held)
        self._log("hold", [request_id, held])

    def reserve(self, namespace: str, token_ids: Sequence[int]) -> Reservation | None:
        """As Scheduler.reserve."""
        made = super().reserve(namespace, token_ids)
        self._log("reserve", [namespace, list(token_ids)], reservation_to_json(made))
        return made

    def adopt(self, reservation_id: int) -> None:
        """As Scheduler.adopt."""
        super().adopt(reservation_id)
        self._log("adopt", reservation_id)

    def abandon(self, reservation_id: int) -> None:
        """As Scheduler.abandon."""
        super().abandon(reservation_id)
        self._log("abandon", reservation_id)

    def pin(self, name: str, namespace: str, token_ids: Sequence[int]) -> int:
        """As Scheduler.pin; a refusal is recorded too."""
        try:
            num_tokens = super().pin(name, namespace, token_ids)
        except RequestError as error:
            self._log("pin", [name, namespace, list(token_ids)], type(error).__name__)
            raise
        self._log("pin", [name, namespace, list(token_ids)], num_tokens)
        return num_tokens

    def unpin(self, name: str) -> bool:
        """As Scheduler.unpin."""
        known = super().unpin(name)
        self._log("unpin", name, known)
        return known

    def shed(self, num_blocks: Sequence[int]) -> list[int]:
        """As Scheduler.shed."""
        num_shed = super().shed(num_blocks)
        self._log("shed", list(num_blocks), num_shed)
        return num_shed

    def plan(self, now: float) -> StepPlan | None:
        """As Scheduler.plan."""
        plan = super().plan(now)
        self._log("plan", now, plan_to_json(plan))
        return plan

    def commit(self, result: StepResult) -> list[RowOutcome]:
        """As Scheduler.commit."""
        outcomes = super().commit(result)
        self._log("commit", asdict(result), [asdict(outcome) for outcome in outcomes])
        return outcomes

    def fail_step(self, message: str) -> list[RowOutcome]:
        """As Scheduler.fail_step."""
        outcomes = super().fail_step(message)
        self._log("fail_step", message, [asdict(outcome) for outcome in outcomes])
        return outcomes


def replay(lines: Iterable[str]) -> int:
    """Drive a fresh scheduler through a trace; return the number of calls.

    Raises:
        ValueError: the trace does not start with limits, or an answer differs from the recorded one.
    """
    calls = iter(lines)
    name, header, _ = json.loads(next(calls, '["nothing",null,null]'))
    if name != "limits":
        raise ValueError(f"a trace starts with its limits, not with {name!r}")
    scheduler = Scheduler(_limits_from_json(header))
    count = 0
    for count, line in enumerate(calls, start=1):
        call, argument, recorded = json.loads(line)
        answer = _ANSWERS[call](scheduler, argument)
        # Through JSON, so that tuples, integer keys and the like compare as they were written.
        if json.loads(json.dumps(answer)) != recorded:
            raise ValueError(f"call {count} ({call}) answered {answer!r}, the trace says {recorded!r}")
    return count


def plan_to_json(plan: StepPlan | None) -> dict[str, Any] | None:
    """A plan as plain JSON values; requests inside admissions are cut to their id."""
    if plan is None:
        return None
    values: dict[str, Any] = {name: getattr(plan, name) for name in _PLAIN_FIELDS}
    values["admissions"] = [[a.row, a.request.request_id, a.output_ids, a.num_cached_tokens] for a in plan.admissions]
    values["block_updates"] = [[u.row, u.group, u.first_index, u.block_ids] for u in plan.block_updates]
    values["restores"] = [[copy.row, copy.checkpoint_id] for copy in plan.restores]
    values["recalls"] = [[index, count] for index, count in plan.recalls.items()]
    values["saves"] = [[copy.row, copy.checkpoint_id] for copy in plan.saves]
    return values


def reservation_to_json(made: Reservation | None) -> list[Any] | None:
    """A reservation as plain JSON values, without the tokens."""
    if made is None:
        return None
    fills = [[fill.group, fill.first_index, fill.block_ids] for fill in made.fills]
    return [made.reservation_id, fills, made.checkpoint_id]


def _answer_add(scheduler: Scheduler, argument: dict[str, Any]) -> object:
    try:
        return scheduler.add(_request_from_json(argument))
    except (RequestError, Busy) as error:
        return type(error).__name__


def _answer_pin(scheduler: Scheduler, argument: list[Any]) -> object:
    try:
        return scheduler.pin(*argument)
    except RequestError as error:
        return type(error).__name__


def _answer_commit(scheduler: Scheduler, argument: dict[str, Any]) -> object:
    return [asdict(outcome) for outcome in scheduler.commit(_result_from_json(argument))]


_PLAIN_FIELDS = (
    *("step_id", "rows", "request_ids", "starts", "num_new", "num_draft", "sample_steps", "token_ids"),
    *("num_decodes", "num_verifies", "releases"),
)

_ANSWERS: dict[str, Callable[[Scheduler, Any], object]] = {
    "add": _answer_add,
    "finish": lambda s, a: s.finish(a[0], num_emitted=a[1]),
    "force": lambda s, a: s.force(a[0], a[1], num_emitted=a[2]),
    "draft": lambda s, a: s.draft(a[0], a[1]),
    "hold": lambda s, a: s.hold(a[0], a[1]),
    "reserve": lambda s, a: reservation_to_json(s.reserve(a[0], a[1])),
    "adopt": lambda s, a: s.adopt(a),
    "abandon": lambda s, a: s.abandon(a),
    "pin": _answer_pin,
    "unpin": lambda s, a: s.unpin(a),
    "shed": lambda s, a: s.shed(a),
    "plan": lambda s, a: plan_to_json(s.plan(a)),
    "commit": _answer_commit,
    "fail_step": lambda s, a: [asdict(outcome) for outcome in s.fail_step(a)],
}


def _request_to_json(request: Request) -> dict[str, Any]:
    return asdict(request) | {"eos_ids": sorted(request.eos_ids)}


def _request_from_json(values: dict[str, Any]) -> Request:
    sampling = dict(values["sampling"])
    sampling["logit_bias"] = tuple((token_id, bias) for token_id, bias in sampling["logit_bias"])
    return Request(
        **values
        | {
            "sampling": SamplingParams(**sampling),
            "prompt_ids": tuple(values["prompt_ids"]),
            "eos_ids": frozenset(values["eos_ids"]),
            "stop": tuple(values["stop"]),
            "grammar": _grammar_from_json(values["grammar"]),
            "reading": _reading_from_json(values["reading"]),
            "speculation": None,  # whoever drafts calls ``draft``
            "checkpoint_positions": tuple(values["checkpoint_positions"]),
        }
    )


def _reading_from_json(values: dict[str, Any] | None) -> AnswerReading | None:
    """Without the tools, which no plan depends on."""
    if values is None:
        return None
    own = {name: value for name, value in values.items() if name != "policy"}
    return AnswerReading(**own | {"close_ids": tuple(values["close_ids"])})


def _grammar_from_json(values: dict[str, Any] | None) -> Grammar | None:
    return None if values is None else Grammar(**values | {"choices": tuple(values["choices"])})


def _result_from_json(values: dict[str, Any]) -> StepResult:
    def logprobs(rows: dict[str, list[dict[str, Any]]]) -> dict[int, list[TokenLogprobs]]:
        return {int(i): [TokenLogprobs(**entry) for entry in entries] for i, entries in rows.items()}

    return StepResult(
        step_id=values["step_id"],
        token_ids=values["token_ids"],
        logprobs=logprobs(values["logprobs"]),
        prompt_logprobs=logprobs(values["prompt_logprobs"]),
        failures={int(i): message for i, message in values["failures"].items()},
        ends=values["ends"],
        dead_ends={int(i): message for i, message in values["dead_ends"].items()},
    )


def _limits_from_json(values: dict[str, Any]) -> SchedulerLimits:
    groups = tuple(AttentionSpec(**group | {"layers": tuple(group["layers"])}) for group in values["groups"])
    return SchedulerLimits(**values | {"groups": groups, "num_blocks": tuple(values["num_blocks"])})
