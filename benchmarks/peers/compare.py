"""One comparison: Troth and one or more settings of a peer, interleaved; ratios of medians against the peer's best."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import troth
from benchmarks import lib
from benchmarks.engine.figures import decode_tokens_per_s, prefill_tokens_per_s
from benchmarks.peers.peer import Peer
from troth.artifact.resolve import resolve
from troth.config.options import EngineOptions, ModelOptions

FIGURES = {
    "decode_ctx16": ("decode", 16),
    "decode_ctx1024": ("decode", 1024),
    "prefill_512": ("prefill", 512),
    "prefill_1024": ("prefill", 1024),
}
TESTS = ("tests/cpu/test_laws.py",)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the peer."""

    name: str
    arguments: tuple[str, ...]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a comparison."""
    made = lib.parser(description)
    made.add_argument("--peer-python", required=True, help="python of the environment that holds the peer")
    made.add_argument("--model", help="default: the demo model")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--repetitions", type=int, default=5)
    made.add_argument("--dtype", default=None, help="Troth's activations")
    made.add_argument("--kv-dtype", default=None, help="Troth's cache format")
    return made


def compare(name: str, script: str, settings: tuple[Setting, ...], arguments: argparse.Namespace) -> None:
    """Run, print and finish."""
    lib.gate(TESTS, arguments)
    path = str(resolve(arguments.model).files[0].path)
    peers = {s.name: Peer(arguments.peer_python, script, path, str(arguments.threads), *s.arguments) for s in settings}
    engine = troth.Engine.open(
        path,
        model_options=ModelOptions(context_tokens=2048, dtype=arguments.dtype, kv_dtype=arguments.kv_dtype),
        engine_options=EngineOptions(threads=arguments.threads),
    )
    series: dict[str, dict[str, list[float]]] = {}
    ratios: dict[str, float] = {}
    with engine:
        for figure, (kind, tokens) in FIGURES.items():
            ours = partial(decode_tokens_per_s if kind == "decode" else prefill_tokens_per_s, engine, tokens)
            runs: dict[str, Callable[[], float]] = {"troth": ours}
            runs |= {label: partial(peer.ask, kind, tokens) for label, peer in peers.items()}
            series[figure] = lib.interleaved(runs, arguments.repetitions)
            middle = lib.medians(series[figure])
            best = max(value for label, value in middle.items() if label != "troth")
            ratios[figure] = middle["troth"] / best
            for label, value in middle.items():
                lib.line(f"{figure} {label}", value, "tok/s", spread=series[figure][label])
            print(f"{figure:34} {ratios[figure]:10.2f} x the peer's best")
        info = engine.info
    about: dict[str, Any] = {label: peer.about for label, peer in peers.items()}
    for peer in peers.values():
        peer.close()
    options = {"model": info.model, "threads": arguments.threads, "dtype": info.dtype, "kv_dtype": info.kv_dtype}
    result = lib.stamp(options) | {"ratios": ratios, "series": series, "peer": about}
    result["load_s"] = info.load_s
    result["memory_gb_per_s"] = lib.memory_gb_per_s(arguments.threads)
    lib.finish(name, result, arguments)
