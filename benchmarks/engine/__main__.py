"""Prefill and decode speed of a model at batch 1, throughput at several batch sizes, load time and peak memory.

The floor of decode is memory: the weights as they lie in memory, once per step, plus the KV cache once per token.
"""

from __future__ import annotations

import resource
import sys
import time
from statistics import median

import troth
from benchmarks import lib
from benchmarks.engine.figures import batch_tokens_per_s, decode_tokens_per_s, prefill_tokens_per_s
from troth.config.options import EngineOptions, ModelOptions

TESTS = ("tests/cpu/test_laws.py", "tests/portable/test_scheduler.py")


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--model", help="a folder or .gguf; default: the demo model")
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--kv-dtype", default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--contexts", type=int, nargs="+", default=[16, 1024])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    lib.gate(TESTS, arguments)
    began = time.perf_counter()
    engine = troth.Engine.open(
        arguments.model,
        model_options=ModelOptions(
            device=arguments.device, dtype=arguments.dtype, kv_dtype=arguments.kv_dtype, context_tokens=2048
        ),
        engine_options=EngineOptions(threads=arguments.threads, max_rows=max([8, *arguments.batches])),
    )
    load_s = time.perf_counter() - began
    with engine:
        figures: dict[str, float] = {"load_s": load_s, "engine_load_s": engine.info.load_s}
        plan = engine.plan
        bandwidth = lib.memory_gb_per_s(arguments.threads or 2) * 1e9
        kv_per_token = sum(group.bytes_per_block for group in plan.groups) / 16
        lib.line("load", load_s, "s")
        for num_prompt in arguments.prompts:
            values = [prefill_tokens_per_s(engine, num_prompt) for _ in range(arguments.repetitions)]
            figures[f"prefill_{num_prompt}"] = median(values)
            lib.line(f"prefill {num_prompt}", median(values), "tok/s", spread=values)
        for context in arguments.contexts:
            floor = bandwidth / (plan.weights_bytes + context * kv_per_token)
            values = [decode_tokens_per_s(engine, context) for _ in range(arguments.repetitions)]
            figures[f"decode_ctx{context}"] = median(values)
            lib.line(f"decode at context {context}", median(values), "tok/s", floor, values)
        for rows in arguments.batches:
            values = [batch_tokens_per_s(engine, rows) for _ in range(arguments.repetitions)]
            figures[f"decode_batch{rows}"] = median(values)
            lib.line(f"decode, {rows} rows together", median(values), "tok/s", spread=values)
        info = engine.info
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    figures["peak_rss_bytes"] = peak
    figures["weights_bytes"] = plan.weights_bytes
    lib.line("peak memory of the process", peak / 2**20, "MiB")
    options = {"model": info.model, "dtype": info.dtype, "kv_dtype": info.kv_dtype, "device": info.device}
    result = lib.stamp(options) | {"figures": figures, "memory_gb_per_s": bandwidth / 1e9}
    lib.finish(f"engine-{info.device.split(':')[0]}", result, arguments)


if __name__ == "__main__":
    main()
