"""One comparison: Troth and one or more settings of a peer, interleaved; ratios of medians against the peer's best.

Beside each decode figure stands the floor of the file: a step reads every weight that takes part in it once, as the
file holds them, and each row's keys and values, at the speed at which memory was read in turns with the figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import troth
from benchmarks import lib
from benchmarks.engine.figures import batch_tokens_per_s, decode_tokens_per_s, prefill_tokens_per_s
from benchmarks.peers.peer import Peer
from troth.artifact.artifact import Artifact
from troth.artifact.resolve import resolve
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.names import BLOCK_TOKENS

MEASURES: dict[str, Callable[[troth.Engine, int], float]] = {
    "decode": decode_tokens_per_s,
    "prefill": prefill_tokens_per_s,
    "batch": batch_tokens_per_s,
}
"""By kind of figure: tokens per second of an engine, given the figure's number."""
BATCH_CONTEXT = 16
"""Prompt tokens of each row of a batch."""
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
    made.add_argument("--inputs", default=None, help="what Troth's quantised layers round their inputs to")
    return made


def compare(
    name: str,
    script: str,
    settings: tuple[Setting, ...],
    arguments: argparse.Namespace,
    figures: Mapping[str, tuple[str, int]] = FIGURES,
) -> None:
    """Run, print and finish.

    Args:
        name: of the result; that of a model is added where it is not the demo.
        script: the peer's side.
        settings: ways to run the peer.
        arguments: of ``parser``.
        figures: by name, the kind and its number: tokens of the prompt or context, or rows of the batch.
    """
    lib.gate(TESTS, arguments)
    artifact = resolve(arguments.model)
    path = str(artifact.files[0].path)
    peers = {s.name: Peer(arguments.peer_python, script, path, str(arguments.threads), *s.arguments) for s in settings}
    engine = troth.Engine.open(
        path,
        model_options=ModelOptions(
            context_tokens=2048, dtype=arguments.dtype, kv_dtype=arguments.kv_dtype, inputs=arguments.inputs
        ),
        engine_options=EngineOptions(threads=arguments.threads),
    )
    series: dict[str, dict[str, list[float]]] = {}
    ratios: dict[str, float] = {}
    floors: dict[str, float] = {}
    memory: dict[str, list[float]] = {}
    with engine:
        for figure, (kind, number) in figures.items():
            runs: dict[str, Callable[[], float]] = {"troth": partial(MEASURES[kind], engine, number)}
            runs |= {label: partial(peer.ask, kind, number) for label, peer in peers.items()}
            # In turns with the others: on a machine that is shared memory is half as fast again a minute later.
            runs["memory"] = partial(lib.memory_gb_per_s, arguments.threads)
            series[figure] = lib.interleaved(runs, arguments.repetitions)
            memory[figure] = series[figure].pop("memory")
            middle = lib.medians(series[figure])
            best = max(value for label, value in middle.items() if label != "troth")
            ratios[figure] = middle["troth"] / best
            if kind != "prefill":
                read = bytes_per_token(artifact, engine, kind, number)
                floors[figure] = median(memory[figure]) * 1e9 / read
            for label, value in middle.items():
                lib.line(f"{figure} {label}", value, "tok/s", floors.get(figure), series[figure][label])
            print(f"{figure:34} {ratios[figure]:10.2f} x the peer's best")
        info = engine.info
    about: dict[str, Any] = {label: peer.about for label, peer in peers.items()}
    for peer in peers.values():
        peer.close()
    options = {"model": info.model, "threads": arguments.threads, "dtype": info.dtype, "kv_dtype": info.kv_dtype}
    options |= {"inputs": arguments.inputs}
    result = lib.stamp(options) | {"ratios": ratios, "series": series, "floors": floors, "peer": about}
    result["load_s"] = info.load_s
    result["memory_gb_per_s"] = memory
    name += "" if arguments.model is None else f"-{Path(path).stem}"
    name += "" if arguments.inputs is None else f"-inputs-{arguments.inputs}"
    lib.finish(name, result, arguments)


def bytes_per_token(artifact: Artifact, engine: troth.Engine, kind: str, number: int) -> float:
    """What must be read from memory for each token of a decode figure: weights once a step, each row's cache."""
    rows, context = (number, BATCH_CONTEXT) if kind == "batch" else (1, number)
    weights = artifact.weight_bytes
    if artifact.gguf is not None and "output.weight" in artifact.gguf.tensors:
        weights -= artifact.gguf.tensors["token_embd.weight"].num_bytes  # only rows of it are looked up
    kv_per_token = sum(group.bytes_per_block for group in engine.plan.groups) / BLOCK_TOKENS
    return weights / rows + context * kv_per_token
