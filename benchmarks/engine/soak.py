"""Whether memory stays flat: a thousand requests of any length, and what the process and the card hold as they end.

    python -m benchmarks.random_model FOLDER --shape qwen3-8b --device cuda
    python -m benchmarks.engine.soak --model FOLDER --device cuda

Prompts have 10 to 1,500 tokens and answers 1 to 60, greedy and drawn, with and without what the prompt cache has; some
are cancelled. Requests overlap: each tenth of them is sent together. "Flat" compares the last tenth with the second:
the first fills pools, captures and compiled kernels. Captured steps and blocks of the prompt cache are counted, because
each takes main memory, too.
"""

from __future__ import annotations

import logging
import random
import resource
import time
from pathlib import Path

import torch

import troth
from benchmarks import lib
from benchmarks.engine.figures import prompt_ids
from troth import Engine
from troth.config.options import EngineOptions, ModelOptions

TESTS = ("tests/portable/test_engine_thread.py",)
PARTS = 10


class Captures(logging.Handler):
    """Counts the steps that engines of this process capture, by what they log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0
        log = logging.getLogger("troth")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """As logging.Handler."""
        self.count += str(record.msg).startswith("captured")


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=64)
    arguments = parser.parse_args()
    lib.gate(TESTS, arguments)
    readings: list[dict[str, float]] = []
    captures = Captures()
    options = ModelOptions(device=arguments.device, context_tokens=4096)
    with troth.Engine.open(
        arguments.model,
        model_options=options,
        engine_options=EngineOptions(max_rows=arguments.rows, max_waiting=arguments.requests),
    ) as engine:
        draw = random.Random(0)
        while not engine.has_rehearsed:
            time.sleep(0.1)
        text = ", ".join(f"{name} {value / 2**20:,.1f} MiB" for name, value in held().items())
        print(f"before any request: {text}, {captures.count} captures", flush=True)
        for part in range(PARTS):
            serve(engine, draw, arguments.requests // PARTS)
            readings.append(held())
            text = ", ".join(f"{name} {value / 2**20:,.1f} MiB" for name, value in readings[-1].items())
            done = (part + 1) * arguments.requests // PARTS
            cached = cached_blocks(engine)
            print(f"after {done:5} requests: {text}, {captures.count} captures, {cached} cached blocks", flush=True)
            readings[-1] |= {"captures": captures.count, "cached_blocks": cached}
        status = engine.status()
    growth = {name: readings[-1][name] - readings[1][name] for name in held()}
    for name, value in growth.items():
        print(f"{name} grew by {value / 2**20:.2f} MiB over the last {PARTS - 2} parts")
    result = lib.stamp({"requests": arguments.requests, "rows": arguments.rows, "device": arguments.device})
    result |= {"readings": readings, "growth_bytes": growth, "blocks_used": status.blocks_used}
    lib.finish("engine-soak", result, arguments)


def serve(engine: Engine, draw: random.Random, count: int) -> None:
    """Send so many requests together and wait for all."""
    prompts = [prompt_ids(draw.randint(10, 1500), engine.info.vocab_size) for _ in range(count)]
    seen = prompts[: count // 2]
    engine.complete_all(seen, max_tokens=draw.randint(1, 60), temperature=0, ignore_eos=True)
    # Again, from the prompt cache, beside others that are drawn.
    mixed = [*prompts[count // 2 :], *([*prompt[: len(prompt) * 2 // 3], 7, 8] for prompt in seen[: count // 4])]
    engine.complete_all(mixed, max_tokens=draw.randint(1, 60), temperature=0.8, top_p=0.9, ignore_eos=True)
    for prompt in seen[: count // 20]:
        with engine.stream_completion(prompt, max_tokens=200, temperature=0, ignore_eos=True) as stream:
            next(iter(stream))


def cached_blocks(engine: Engine) -> int:
    """What the prompt cache holds and no request does."""
    status = engine.status()
    blocks = sum(group.num_blocks for group in engine.plan.groups)
    return blocks - sum(status.blocks_used) - sum(status.blocks_free)


def held() -> dict[str, float]:
    """Bytes held now: of main memory, and of the card by tensors and by the allocator."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    reading: dict[str, float] = {"rss": resident}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        reading |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    return reading


if __name__ == "__main__":
    main()
