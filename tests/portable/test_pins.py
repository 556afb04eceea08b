"""Pinned prefixes: they survive every pressure, never take what the largest request needs, and end by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from troth.contracts.cache_spec import AttentionSpec
from troth.contracts.events import Completed, Event, Failed
from troth.contracts.names import BLOCK_TOKENS, RequestId
from troth.contracts.prefix_cache import PinnedPrefix
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.errors import CapabilityUnavailable, RequestError
from troth.run.engine import EngineLoop
from troth.schedule import invariants
from troth.schedule.admission import SchedulerLimits
from troth.schedule.replay import RecordingScheduler, replay
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.testing.fake_runner import FakeRunner

FULL = AttentionSpec(layers=(0,), num_kv_heads=1, head_dim=1, value_dim=1, element_bytes=1)
LIMITS = SchedulerLimits(
    groups=(FULL,),
    num_blocks=(12,),
    max_rows=2,
    max_waiting=64,
    chunk_tokens=64,
    step_tokens=64,
    context_tokens=96,
    prompt_cache=True,
)
GREEDY = SamplingParams(temperature=0.0)


class Sink:
    """Keeps what an engine says."""

    last_read = 0.0

    def __init__(self) -> None:
        self.events: list[Event] = []

    def offer(self, event: Event) -> bool:
        self.events.append(event)
        return True

    @property
    def end(self) -> Completed | Failed:
        last = self.events[-1]
        assert isinstance(last, Completed | Failed), last
        return last


class Driven:
    """An engine over a fake runner; each request runs to its end."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.trace: list[str] = []
        self.scheduler = RecordingScheduler(limits, self.trace.append)
        self.loop = EngineLoop(self.scheduler, runner_for(limits), ByteTokenizer(), clock=lambda: 0.0)
        self._num_requests = 0

    def ask(self, ids: Sequence[int], *, pin: str | None = None, max_tokens: int = 1) -> Completed | Failed:
        self._num_requests += 1
        name, sink = RequestId(f"r{self._num_requests}"), Sink()
        self.loop.add(
            Request(request_id=name, prompt_ids=tuple(ids), sampling=GREEDY, max_tokens=max_tokens, pin=pin), sink
        )
        while self.loop.step():
            invariants.check(self.scheduler)
        return sink.end

    def cached(self, ids: Sequence[int]) -> int:
        """How many tokens a request of these finds."""
        end = self.ask(ids)
        assert isinstance(end, Completed), end
        return end.usage.num_cached_tokens

    @property
    def pins(self) -> tuple[PinnedPrefix, ...]:
        status = self.loop.status("ready", ()).prefix_cache
        assert status is not None
        return status.pins

    def fill(self) -> None:
        """Ask for so much else that the pool forgets all that it may."""
        for number in range(6):
            self.ask([200 - number] * 80)


def runner_for(limits: SchedulerLimits) -> FakeRunner:
    return FakeRunner(limits.groups, limits.num_blocks, vocab_size=256, recurrent=limits.num_checkpoints is not None)


def text(letter: int, num_tokens: int) -> list[int]:
    return [letter + at % 7 for at in range(num_tokens)]


def test_pin_survives_pressure_that_evicts_what_is_not_pinned() -> None:
    driven = Driven()
    assert isinstance(driven.ask(text(1, 64), pin="system"), Completed)
    assert isinstance(driven.ask(text(50, 64)), Completed)
    driven.fill()
    assert driven.pins == (PinnedPrefix(name="system", num_tokens=64, num_bytes=4 * FULL.bytes_per_block),)
    assert driven.cached([*text(1, 64), 9, 9]) == 64
    assert driven.cached([*text(50, 64), 9, 9]) == 0


def test_unpin_lets_the_prefix_go_with_the_others() -> None:
    driven = Driven()
    driven.ask(text(1, 64), pin="system")
    driven.loop.unpin("system")
    assert driven.pins == ()
    assert driven.cached([*text(1, 64), 9]) == 64, "it is only not kept any more"
    driven.fill()
    assert driven.cached([*text(1, 64), 9]) == 0


def test_pin_is_refused_by_name_when_the_largest_request_would_not_fit_beside_it() -> None:
    driven = Driven()
    assert isinstance(driven.ask(text(1, 48), pin="first"), Completed)
    refused = driven.ask(text(50, 64), pin="second")
    assert isinstance(refused, Failed)
    assert (refused.kind, refused.param, refused.code) == ("RequestError", "pin", "pin_does_not_fit")
    assert "'second'" in refused.message
    assert "7 of 12 KV cache blocks" in refused.message
    assert [pin.name for pin in driven.pins] == ["first"]
    # 96 tokens are six blocks; five may be pinned, and the largest request still ends.
    assert isinstance(driven.ask(text(90, 90), max_tokens=6), Completed)


def test_pins_that_share_a_beginning_hold_it_once() -> None:
    driven = Driven()
    common = text(1, 48)
    for number in range(3):
        assert isinstance(driven.ask([*common, *text(60 + 9 * number, 16)], pin=f"p{number}"), Completed)
    status = driven.loop.status("ready", ()).prefix_cache
    assert status is not None
    assert status.pinned_bytes == 6 * FULL.bytes_per_block
    assert sum(pin.num_bytes for pin in status.pins) == 12 * FULL.bytes_per_block


def test_pin_again_under_the_same_name_takes_the_place_of_the_older() -> None:
    driven = Driven()
    driven.ask(text(1, 64), pin="system")
    driven.ask(text(50, 48), pin="system")
    assert [(pin.name, pin.num_tokens) for pin in driven.pins] == [("system", 48)]
    driven.fill()
    assert driven.cached([*text(1, 64), 9]) == 0
    assert driven.cached([*text(50, 48), 9]) == 48


def test_pin_of_less_than_a_block_is_refused_and_says_why() -> None:
    refused = Driven().ask(text(1, BLOCK_TOKENS - 1), pin="short")
    assert isinstance(refused, Failed)
    assert (refused.code, "whole blocks of 16" in refused.message) == ("nothing_to_pin", True)


def test_pin_without_a_prompt_cache_is_unavailable() -> None:
    refused = Driven(replace(LIMITS, prompt_cache=False)).ask(text(1, 32), pin="system")
    assert isinstance(refused, Failed)
    assert refused.kind == CapabilityUnavailable.__name__


def test_pin_keeps_the_checkpoint_of_a_recurrent_model_and_leaves_half_of_them() -> None:
    limits = replace(LIMITS, num_checkpoints=4, checkpoint_bytes=100, checkpoint_interval_tokens=32)
    driven = Driven(limits)
    for number in range(2):
        assert isinstance(driven.ask(text(1 + 20 * number, 20), pin=f"p{number}"), Completed)
    assert driven.pins[0].num_bytes == FULL.bytes_per_block + 100
    refused = driven.ask(text(90, 20), pin="p2")
    assert isinstance(refused, Failed)
    assert "3 of 4 places for recurrent states" in refused.message
    driven.fill()
    assert driven.cached(text(1, 30)) == 16


def test_pin_of_what_a_failed_row_computed_ends_with_it() -> None:
    """A row under way shares its blocks; when it fails, a pin on them must neither keep nor leak anything."""
    scheduler = Scheduler(LIMITS)
    ids = tuple(text(1, 80))
    scheduler.add(Request(request_id=RequestId("bad"), prompt_ids=ids, sampling=GREEDY, max_tokens=4))
    runner = runner_for(LIMITS)
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.commit(runner.launch(plan).result())
    assert scheduler.pin("early", "", ids[:64]) == 64
    scheduler.plan(0.0)
    scheduler.fail_step("broken")
    assert scheduler.pins.discarded() == ["early"]
    assert scheduler.unpin("early")
    invariants.check(scheduler)
    assert scheduler.pools[0].num_free == 12
    with pytest.raises(RequestError, match="nothing of prefix"):
        scheduler.pin("late", "", ids[:64])


def test_pins_are_replayed_from_a_trace() -> None:
    driven = Driven()
    driven.ask(text(1, 64), pin="system")
    driven.ask(text(1, 10), pin="short")
    driven.fill()
    driven.loop.unpin("system")
    driven.fill()
    assert {line.split(",", 1)[0] for line in driven.trace} >= {'["pin"', '["unpin"'}
    assert replay(driven.trace) == len(driven.trace) - 1
