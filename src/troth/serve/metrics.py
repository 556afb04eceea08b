"""GET /metrics: counters in the Prometheus text format.

Refuses to know HTTP bodies. Nothing here is called per token. Read next: ``status.py``, the same facts as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from troth.contracts.events import Completed
from troth.contracts.ports import EngineStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """One server's counters, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._engines = _Engines()
        registry.register(self._engines)
        ProcessCollector(registry=registry)
        self._responses = Counter("troth_http_responses", "HTTP responses", ("route", "status"), registry=registry)
        self._running = Gauge("troth_generations_running", "Generations under way", registry=registry)
        self._ttft = Histogram(
            "troth_time_to_first_token_seconds",
            "From submission to the first token",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._tpot = Histogram(
            "troth_time_per_output_token_seconds",
            "Mean time between tokens of one answer",
            ("model",),
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

    def responded(self, route: str, status: int) -> None:
        """Count a response by its route's template; 499 stands for a client that went away first."""
        self._responses.labels(route, str(status)).inc()

    def completed(self, model: str, completed: Completed) -> None:
        """Take in the timings of an answer."""
        timings, num_tokens = completed.timings, completed.usage.num_completion_tokens
        self._ttft.labels(model).observe(timings.queued_s + timings.prefill_s)
        if num_tokens > 1:
            self._tpot.labels(model).observe(timings.decode_s / (num_tokens - 1))

    def render(self, statuses: Iterable[tuple[str, EngineStatus]], num_running: int) -> bytes:
        """The exposition, with the engines' numbers as of now."""
        self._engines.statuses = list(statuses)
        self._running.set(num_running)
        return generate_latest(self._registry)


class _Engines(Collector):
    """Engine statuses as metrics; (model, status) pairs are set before each rendering."""

    def __init__(self) -> None:
        self.statuses: list[tuple[str, EngineStatus]] = []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield self._gauge("ready", "1 when the engine takes requests", lambda one: one.state == "ready")
        yield self._gauge("requests_running", "Requests with a row", lambda one: one.num_running)
        yield self._gauge("requests_waiting", "Requests waiting for a row", lambda one: one.num_waiting)
        yield self._counter("steps", "Engine steps", lambda one: one.num_steps)
        yield self._counter("prompt_tokens", "Prompt tokens", lambda one: one.num_prompt_tokens)
        yield self._counter("completion_tokens", "Emitted tokens", lambda one: one.num_completion_tokens)
        yield self._counter("cached_tokens", "Prompt tokens the cache served", lambda one: one.num_cached_tokens)
        yield self._counter("preemptions", "Requests that lost their row", lambda one: one.num_preemptions)
        blocks = GaugeMetricFamily("troth_engine_blocks", "KV cache blocks", labels=("model", "group", "use"))
        ends = CounterMetricFamily("troth_engine_requests", "Requests by end", labels=("model", "end"))
        disk_bytes = GaugeMetricFamily("troth_engine_disk_cache_bytes", "Disk cache files", labels=("model",))
        restores = CounterMetricFamily(
            "troth_engine_restores", "Prompts looked for on disk by outcome", labels=("model", "outcome")
        )
        drafts = CounterMetricFamily(
            "troth_engine_draft_tokens", "Proposed tokens by source and outcome", labels=("model", "source", "outcome")
        )
        for model, status in self.statuses:
            cached = () if status.prefix_cache is None else status.prefix_cache.num_blocks
            for use, counts in (("used", status.blocks_used), ("cached", cached), ("free", status.blocks_free)):
                for group, count in enumerate(counts):
                    blocks.add_metric((model, str(group), use), count)
            disk = None if status.prefix_cache is None else status.prefix_cache.disk
            if disk is not None:
                disk_bytes.add_metric((model,), disk.num_bytes)
                for outcome, count in disk.num_restores.items():
                    restores.add_metric((model, outcome), count)
            if status.speculation is not None:
                for source, drafted in status.speculation.num_drafted_by_source.items():
                    accepted = status.speculation.num_accepted_by_source.get(source, 0)
                    drafts.add_metric((model, source, "accepted"), accepted)
                    drafts.add_metric((model, source, "rejected"), drafted - accepted)
            for end, count in status.num_requests_by_end.items():
                ends.add_metric((model, end), count)
        yield blocks
        yield disk_bytes
        yield restores
        yield drafts
        yield ends

    def _gauge(self, name: str, text: str, value: Callable[[EngineStatus], float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"troth_engine_{name}", text, labels=("model",))
        for model, status in self.statuses:
            family.add_metric((model,), value(status))
        return family

    def _counter(self, name: str, text: str, value: Callable[[EngineStatus], float]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"troth_engine_{name}", text, labels=("model",))
        for model, status in self.statuses:
            family.add_metric((model,), value(status))
        return family
