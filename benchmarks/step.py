"""CPU time of the scheduler alone: plan + commit, no model, no tensors.

Targets: 256 running rows within 1.0 ms per step on one core; 1,000 requests through in under 2 s.
"""

from __future__ import annotations

import time
from statistics import median

from benchmarks import lib
from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.names import RequestId
from troth.contracts.plan import NO_SAMPLE, StepPlan, StepResult
from troth.contracts.request import Request
from troth.schedule.admission import SchedulerLimits
from troth.schedule.scheduler import Scheduler

TESTS = ("tests/portable/test_scheduler.py", "tests/portable/test_replay.py")
TARGET_STEP_MS, TARGET_REQUESTS_S = 1.0, 2.0
ROWS = 256


def main() -> None:
    """Measure and print."""
    arguments = lib.parser(__doc__).parse_args()
    lib.gate(TESTS, arguments)
    steps = running_steps()
    plan_ms, commit_ms = (median(part) * 1e3 for part in zip(*steps, strict=True))
    whole_ms = sorted((plan + commit) * 1e3 for plan, commit in steps)
    seconds = [thousand_requests() for _ in range(5)]
    lib.line("plan, 256 rows", plan_ms, "ms")
    lib.line("commit, 256 rows", commit_ms, "ms")
    lib.line("plan + commit, 256 rows", median(whole_ms), "ms", TARGET_STEP_MS, whole_ms)
    lib.line("1,000 requests", median(seconds), "s", TARGET_REQUESTS_S, seconds)
    figures = {
        "step_256_rows_ms": median(whole_ms),
        "step_256_rows_p99_ms": whole_ms[int(len(whole_ms) * 0.99)],
        "requests_1000_s": median(seconds),
    }
    lib.finish("step", lib.stamp({"rows": ROWS}) | {"figures": figures}, arguments)


def running_steps() -> list[tuple[float, float]]:
    """Seconds of plan and of commit for every step with 256 decoding rows."""
    scheduler = Scheduler(limits(ROWS))
    for i in range(ROWS):
        scheduler.add(request(i, 100, 400))
    seconds = []
    while True:
        begun = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        if plan is None:
            return seconds
        result = answer(plan)
        before = time.perf_counter()
        scheduler.commit(result)
        committed = time.perf_counter()
        if len(plan.rows) == ROWS and plan.num_tokens == ROWS:
            seconds.append((planned - begun, committed - before))


def thousand_requests() -> float:
    """Seconds to take 1,000 requests of 100 + 64 tokens from arrival to end."""
    scheduler = Scheduler(limits(1000))
    begun = time.perf_counter()
    for i in range(1000):
        scheduler.add(request(i, 100, 64))
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(answer(plan))
    return time.perf_counter() - begun


def limits(num_requests: int) -> SchedulerLimits:
    """A GPU server's numbers."""
    spec = AttentionSpec(layers=(0,), num_kv_heads=8, head_dim=128, value_dim=128, element_bytes=2)
    return SchedulerLimits(
        groups=(spec,),
        num_blocks=(ROWS * 40,),
        max_rows=ROWS,
        max_waiting=num_requests,
        chunk_tokens=2048,
        step_tokens=8192,
        context_tokens=4096,
        prompt_cache=True,
    )


def request(number: int, num_prompt: int, max_tokens: int) -> Request:
    """A prompt nobody shares."""
    prompt = tuple((number * 31 + i) % 1000 for i in range(num_prompt))
    return Request(request_id=RequestId(str(number)), prompt_ids=prompt, max_tokens=max_tokens)


def answer(plan: StepPlan) -> StepResult:
    """One token for every row that samples."""
    return StepResult(plan.step_id, [[5] if step != NO_SAMPLE else [] for step in plan.sample_steps])


if __name__ == "__main__":
    main()
