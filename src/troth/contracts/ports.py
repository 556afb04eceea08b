"""The seams between rings: what the scheduler drives, what clients see of an engine, where time comes from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from troth.contracts.events import Event
from troth.contracts.memory_plan import MemoryPlan, MemoryStatus
from troth.contracts.names import RequestId
from troth.contracts.plan import StepPlan, StepResult
from troth.contracts.prefix_cache import PrefixCacheStatus
from troth.contracts.request import Request
from troth.contracts.speculation import SpeculationStats


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float:
        """Now."""


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step. Raises DeviceError when it failed as a whole."""


class StepRunner(Protocol):
    """Computes plans. One step may still be under way when the next is launched; steps run in order of launch."""

    def starts(self, plan: StepPlan) -> bool:
        """Whether launching this plan next would only start it. False: ``launch`` would compute it, and whoever waits
        for an earlier step must read that first. A runner whose steps are always read before the next says True."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. The plan is not changed by either side afterwards. Raises DeviceError."""

    def close(self) -> None:
        """Give the device memory back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is, fixed once it is ready."""

    model: str
    """The name it is served under."""
    family: str
    context_tokens: int
    max_rows: int
    vocab_size: int
    max_waiting: int
    device: str
    dtype: str
    kv_dtype: str
    pipeline_depth: int
    plan: MemoryPlan
    load_s: float
    weights: str | None = None
    """What matrices of layers are rounded to; None: they are as the artifact holds them."""
    load_stages_s: dict[str, float] = field(default_factory=dict)
    """Stages of the load in order, and the seconds that each took."""
    inputs: str | None = None
    """What quantised matrices of layers have their inputs rounded to, as an option; None: the kernels decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What an engine is doing now."""

    state: str
    """loading, ready, failed or closed."""
    num_running: int
    num_waiting: int
    num_steps: int
    blocks_used: tuple[int, ...]
    """Blocks in use by requests, by cache group."""
    blocks_free: tuple[int, ...]
    """Blocks nobody holds; what remains to the pool's size is cached."""
    num_prompt_tokens: int
    """Totals since the start."""
    num_completion_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_requests_by_end: dict[str, int]
    """Finish reason or error class -> requests."""
    downgrades: tuple[str, ...] = ()
    """Every fallback in force, in words."""
    speculation: SpeculationStats | None = None
    """What became of all drafts; None: this engine makes none."""
    prefix_cache: PrefixCacheStatus | None = None
    """The prompt cache; None: there is none."""
    memory: MemoryStatus | None = None
    """What the process holds; None: it is not followed."""


class EventStream(Protocol):
    """The events of one request. One consumer; dropping it cancels the request."""

    @property
    def request_id(self) -> RequestId:
        """The request this stream belongs to."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """The stream itself."""

    async def __anext__(self) -> Event:
        """The next event; StopAsyncIteration after Completed or Failed."""

    def end_reasoning(self) -> None:
        """Ask the engine to close the reasoning of this answer now, as a used-up budget would; any thread.

        Reasoning that has not begun is closed as it begins. No effect where it is over, or was never marked.
        """

    def cancel(self, reason: str = "requested") -> None:
        """Ask the engine to stop; the stream still ends with Completed(aborted) or Failed. Idempotent, any thread."""


class EngineClient(Protocol):
    """A cheap handle on an engine, in this process or another."""

    @property
    def info(self) -> EngineInfo:
        """Raises NotReady while loading."""

    def submit(self, request: Request) -> EventStream:
        """Hand a request over. Refusals (queue full, never fits) arrive as the stream's first event, Failed."""

    def unpin(self, name: str) -> None:
        """Let the prompt that a request pinned by this name go, before anything submitted later. No effect if none is.

        ``PrefixCacheStatus.pins`` lists what is pinned.
        """

    async def status(self) -> EngineStatus:
        """A snapshot."""

    async def aclose(self) -> None:
        """Stop the engine: running requests end with Failed(Cancelled), memory is given back."""
