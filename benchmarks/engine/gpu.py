"""A GPU's figures on a model: decode at three batch sizes, prefill, a mixed load, and the start.

    python -m benchmarks.random_model FOLDER --shape qwen3-8b --device cuda
    python -m benchmarks.engine.gpu --model FOLDER

Decode: prompts of 128 tokens, from the 128th new token to the 256th, all rows together (one row: from the first), by
the clock of the row that came last, so that prefill is not in it. Its ceiling is reading every weight once per step;
that of prefill, the products of the linear layers alone. The start is from an empty process to the first token of an
answer. Mixed: many requests at once, of which ``--chunk-tokens`` of prompts are fed beside decodes.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time
from statistics import median

import torch

import troth
from benchmarks import lib
from benchmarks.engine.figures import prefill_tokens_per_s, prompt_ids
from troth import Engine
from troth.artifact.resolve import resolve
from troth.config.options import EngineOptions, ModelOptions

TESTS = ("tests/device",)
PROMPT, HALF = 128, 128
FIRST_TOKEN = """
import sys, troth
from troth.config.options import ModelOptions
with troth.Engine.open(sys.argv[1], model_options=ModelOptions(device=sys.argv[2], context_tokens=16384)) as engine:
    engine.complete("Hello", max_tokens=1, temperature=0)
    print("first token", flush=True)
"""


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-dtype", default=None)
    parser.add_argument("--weights", default=None)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=256, help="of the mixed load; 0: none")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--skip-start", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--chunk-tokens", type=int, default=None)
    arguments = parser.parse_args()
    lib.gate(TESTS, arguments)
    figures: dict[str, float] = {}
    spreads: dict[str, list[float]] = {}

    def keep(name: str, values: list[float], unit: str, ceiling: float | None = None) -> None:
        figures[name], spreads[name] = median(values), values
        lib.line(name, median(values), unit, ceiling, values)
        sys.stdout.flush()

    if not arguments.skip_start:
        keep("start_s", [start_s(arguments.model, arguments.device) for _ in range(2)], "s")
    began = time.perf_counter()
    options = ModelOptions(
        device=arguments.device, kv_dtype=arguments.kv_dtype, weights=arguments.weights, context_tokens=16384
    )
    serving = EngineOptions(
        max_rows=256, max_waiting=1024, deterministic=arguments.deterministic, chunk_tokens=arguments.chunk_tokens
    )
    with troth.Engine.open(arguments.model, model_options=options, engine_options=serving) as engine:
        figures["load_s"] = time.perf_counter() - began
        while not engine.has_rehearsed:
            time.sleep(0.1)
        figures["rehearsed_s"] = time.perf_counter() - began
        # As the server's engine process does: Python looks through modules and weights for garbage no more.
        gc.collect()
        gc.freeze()
        for decision in engine.plan.decisions:
            print(f"  {decision}")
        ceilings = Ceilings(engine, arguments.model, arguments.device)
        for rows in arguments.rows:
            decode_tokens_per_s(engine, rows)
            values = [decode_tokens_per_s(engine, rows) for _ in range(arguments.repetitions)]
            keep(f"decode_b{rows}", values, "tok/s", ceilings.decode(rows))
        prefill_tokens_per_s(engine, arguments.prefill)
        values = [prefill_tokens_per_s(engine, arguments.prefill) for _ in range(arguments.repetitions)]
        # Products of codes have another ceiling.
        keep(f"prefill_{arguments.prefill}", values, "tok/s", None if arguments.weights else ceilings.prefill())
        if arguments.requests:
            mixed_tokens_per_s(engine, arguments.requests)
            values = [mixed_tokens_per_s(engine, arguments.requests) for _ in range(arguments.repetitions)]
            keep(f"mixed_{arguments.requests}", values, "tok/s")
        downgrades = engine.status().downgrades
        info = engine.info
    if torch.cuda.is_available():
        figures["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    result = lib.stamp({"model": info.model, "dtype": info.dtype, "kv_dtype": info.kv_dtype, "rows": 256})
    result["options"] |= {"deterministic": arguments.deterministic, "chunk_tokens": arguments.chunk_tokens}
    result["options"]["weights"] = arguments.weights
    result |= {"figures": figures, "spreads": spreads, "downgrades": downgrades, "ceilings": ceilings.measured}
    mode = f"-weights-{arguments.weights}" if arguments.weights else ""
    mode += f"-kv-{arguments.kv_dtype}" if arguments.kv_dtype else ""
    mode += "-deterministic" if arguments.deterministic else ""
    mode += f"-chunk-{arguments.chunk_tokens}" if arguments.chunk_tokens else ""
    lib.finish(f"engine-gpu{mode}", result, arguments)


class Ceilings:
    """What the device reads and multiplies at most, measured."""

    def __init__(self, engine: Engine, model: str, device: str) -> None:
        table, head = vocabulary_bytes(model)
        layers = engine.plan.weights_bytes - table - head
        # Of a table that is no output layer too, a step reads some rows.
        self._read_bytes = layers + (head or table)
        self._layer_bytes = layers
        self.measured = {"read_bytes_per_s": _read_bytes_per_s(device), "flops_per_s": _flops_per_s(device)}

    def decode(self, rows: int) -> float:
        """Tokens per second when a step reads the weights once and all else is free."""
        return rows * self.measured["read_bytes_per_s"] / self._read_bytes

    def prefill(self) -> float:
        """Tokens per second when only the layers' products take time; two operations for each number of two bytes."""
        return self.measured["flops_per_s"] / self._layer_bytes


def vocabulary_bytes(model: str) -> tuple[int, int]:
    """Bytes of a safetensors model's embedding, and of its output layer; 0 where that is the embedding."""
    index = resolve(model).safetensors
    assert index is not None, f"{model} is no folder of safetensors"
    sizes = {stored.name: stored.num_bytes for shard in index.shards for stored in shard.tensors.values()}

    def found(ending: str) -> int:
        return sum(size for name, size in sizes.items() if name.endswith(ending))

    return found("embed_tokens.weight"), found("lm_head.weight")


def start_s(model: str, device: str) -> float:
    """Seconds from an empty process to the first token."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", FIRST_TOKEN, model, device], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.perf_counter() - began
    process.wait()
    assert line == "first token\n", "the engine did not start"
    return seconds


def decode_tokens_per_s(engine: Engine, rows: int) -> float:
    """Tokens of all rows together over the seconds between the middle and the end of their answers."""
    if rows == 1:
        ids = prompt_ids(PROMPT, engine.info.vocab_size)
        reply = engine.complete(ids, max_tokens=2 * HALF, temperature=0, ignore_eos=True)
        return (2 * HALF - 1) / reply.timings.decode_s
    half, whole = (_decode_s(engine, rows, count) for count in (HALF, 2 * HALF))
    return rows * HALF / (whole - half)


def mixed_tokens_per_s(engine: Engine, num_requests: int) -> float:
    """Output tokens per second of requests that come at once, with prompts of 100 to 1,024 tokens and 128 to answer."""
    lengths = random.Random(0)
    prompts = [prompt_ids(lengths.randint(100, 1024), engine.info.vocab_size) for _ in range(num_requests)]
    began = time.perf_counter()
    engine.complete_all(prompts, max_tokens=128, temperature=0, ignore_eos=True)
    return num_requests * 128 / (time.perf_counter() - began)


def _decode_s(engine: Engine, rows: int, num_tokens: int) -> float:
    """Seconds from the first token to the last of the row that came last: all others decode meanwhile."""
    prompts = [prompt_ids(PROMPT, engine.info.vocab_size) for _ in range(rows)]
    replies = engine.complete_all(prompts, max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return min(reply.timings.decode_s for reply in replies)


def _read_bytes_per_s(device: str) -> float:
    data = torch.ones(2**30 if device != "cpu" else 2**26, dtype=torch.float32, device=device)
    return data.numel() * 4 / min(_device_s(lambda: data.sum(), device) for _ in range(5))


def _flops_per_s(device: str) -> float:
    size = 8192 if device != "cpu" else 1024
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    return 2 * size**3 / min(_device_s(lambda: left @ left, device) for _ in range(5))


def _device_s(run: object, device: str) -> float:
    assert callable(run)
    if device == "cpu":
        return lib.timed(run)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    main()
