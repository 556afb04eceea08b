"""What an engine does before it takes requests on a GPU: it answers a few of its own, so that kernels are compiled and
the commonest decodes captured before somebody waits for them. What they cost was measured before (``step_cost.py``).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from troth.contracts.events import Event, Failed
from troth.contracts.failures import error_from_event
from troth.contracts.names import RequestId
from troth.contracts.ports import StepRunner
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.run.engine import EngineLoop
from troth.schedule.admission import SchedulerLimits
from troth.schedule.scheduler import Scheduler
from troth.text.detokenize import TokenBytes

WARM_UP_REQUESTS: Final[tuple[tuple[int, dict[str, float]], ...]] = (
    (1500, {"temperature": 0.0}),
    (40, {"temperature": 1.0}),
    (17, {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    (200, {"temperature": 0.0}),
)
"""Prompt tokens and draws of the requests that are answered first: alone, together, and prompts beside decodes."""
WARM_UP_TOKENS: Final = 24


class _NoConsumer:
    """A consumer of answers that nobody wants; notes what went wrong."""

    last_read = 0.0

    def __init__(self) -> None:
        self.failed: Failed | None = None

    def offer(self, event: Event) -> bool:
        """As run.engine.Sink."""
        if isinstance(event, Failed):
            self.failed = event
        return True


def warm_up(runner: StepRunner, limits: SchedulerLimits, tokenizer: TokenBytes, depth: int) -> None:
    """Answer a few requests on a runner that has not answered any, through a scheduler of their own.

    Args:
        runner: from now on as fresh as before: every row and block is written anew by whoever gets it next.
        limits: of the engine.
        tokenizer: of the model.
        depth: the engine's pipeline depth.

    Raises:
        TrothError: what ended one of them; the engine would answer nobody.
    """
    scheduler = Scheduler(replace(limits, prompt_cache=False, max_waiting=len(WARM_UP_REQUESTS)))
    loop = EngineLoop(scheduler, runner, tokenizer, clock=time.monotonic, pipeline_depth=depth)
    audience = _NoConsumer()
    # An engine may have room for two tokens and no more.
    num_tokens = max(1, min(WARM_UP_TOKENS, limits.largest_request - 1))
    for number, (num_prompt, sampling) in enumerate(WARM_UP_REQUESTS):
        request = Request(
            request_id=RequestId(f"warm-up-{number}"),
            prompt_ids=(0,) * max(1, min(num_prompt, limits.largest_request - num_tokens)),
            max_tokens=num_tokens,
            sampling=SamplingParams(seed=number, **sampling),  # type: ignore[arg-type]
        )
        loop.add(request, audience)
        # The next one comes while this one decodes: its prompt is computed beside decodes.
        loop.step()
        loop.step()
    while loop.step():
        pass
    if audience.failed is not None:
        raise error_from_event(audience.failed)
