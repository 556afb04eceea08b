"""An engine that answers a few requests of its own first, and serves as if it had not."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from tests.portable.test_scheduler import FULL, WINDOW, limits, request
from troth.contracts.plan import StepPlan
from troth.errors import DeviceError
from troth.run.warmup import warm_up
from troth.schedule.admission import SchedulerLimits
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.testing.fake_runner import FakeRunner, expected_answer

GROUPS = (FULL, WINDOW)


def of(context_tokens: int) -> SchedulerLimits:
    return limits(groups=GROUPS, num_blocks=(200, 200), context_tokens=context_tokens, prompt_cache=True)


@pytest.mark.parametrize("context_tokens", [9, 64, 3000])
@pytest.mark.parametrize("depth", [0, 1])
def test_warm_up_leaves_a_runner_that_answers_as_a_fresh_one(context_tokens: int, depth: int) -> None:
    """Whatever it left in rows and blocks is written anew before anybody reads it: the runner checks what it reads."""
    runner = FakeRunner(GROUPS, (200, 200))
    warm_up(runner, of(context_tokens), ByteTokenizer(), depth)
    scheduler, one = Scheduler(of(context_tokens)), request("a", min(40, context_tokens - 3), 3)
    scheduler.add(one)
    answer: list[int] = []
    while (plan := scheduler.plan(0.0)) is not None:
        for outcome in scheduler.commit(runner.launch(plan).result()):
            answer += outcome.token_ids
    assert answer == expected_answer(one, 3, groups=GROUPS)


def test_warm_up_computes_prompts_alone_and_beside_decodes() -> None:
    seen: deque[StepPlan] = deque()

    class Watched(FakeRunner):
        def launch(self, plan: StepPlan) -> Any:
            seen.append(plan)
            return super().launch(plan)

    warm_up(Watched(GROUPS, (200, 200)), of(3000), ByteTokenizer(), 1)
    assert any(plan.num_decodes == 1 == len(plan.rows) for plan in seen)
    assert any(1 < plan.num_decodes == len(plan.rows) for plan in seen)
    assert any(0 < plan.num_decodes < len(plan.rows) for plan in seen)


def test_warm_up_raises_what_would_end_every_request() -> None:
    with pytest.raises(DeviceError):
        warm_up(FakeRunner(GROUPS, (200, 200), fail_step=1), of(3000), ByteTokenizer(), 0)
