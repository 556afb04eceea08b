"""Time to first token of a long conversation's next turn: cold, from memory, from disk; and what sharing saves.

The floor of a warm turn is the cold prompt's own pace over the tokens that are new. Prompts are token ids that no cache
has seen; a turn is the prompt, its answer and some tokens more, as a chat client sends it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from statistics import median

import troth
from benchmarks import lib
from benchmarks.engine.figures import prompt_ids
from troth.config.options import EngineOptions, ModelOptions
from troth.library import Reply

TESTS = (
    "tests/portable/test_prefix_index.py",
    "tests/portable/test_prefix_laws.py",
    "tests/cpu/test_laws.py",
    "tests/cpu/test_disk_cache.py",
)
TARGET = 0.08
"""Warm over cold, at 4,000 tokens on a CPU."""
ANSWER_TOKENS = 24
NUM_TURNS = 5
NEW_TOKENS = 40
"""A question of some thirty words."""


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--model", help="a folder or .gguf; default: the demo model")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=4000, help="length of the conversation")
    parser.add_argument("--system-tokens", type=int, default=2000, help="length of a shared system prompt")
    parser.add_argument("--conversations", type=int, default=32, help="how many share it")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    lib.gate(TESTS, arguments)
    longest = max(arguments.tokens, arguments.system_tokens) + 8 * (ANSWER_TOKENS + NEW_TOKENS)
    with tempfile.TemporaryDirectory() as folder:

        def opened(disk_cache: str | None = None) -> troth.Engine:
            return troth.Engine.open(
                arguments.model,
                model_options=ModelOptions(context_tokens=longest),
                engine_options=EngineOptions(threads=arguments.threads, max_rows=4, disk_cache=disk_cache),
            )

        with opened() as engine:
            figures = turns(engine, arguments) | shared_system_prompt(engine, arguments)
            info = engine.info
        figures |= restarts(lambda: opened(folder), arguments, figures["cold_s"])
    options = {"model": info.model, "dtype": info.dtype, "device": info.device, "tokens": arguments.tokens}
    lib.finish("prompt-cache", lib.stamp(options) | {"figures": figures}, arguments)


def turns(engine: troth.Engine, arguments: argparse.Namespace) -> dict[str, float]:
    """A conversation's first turn, those after it, and the last one asked again."""
    cold, warm, again, new = [], [], [], 0
    for _ in range(arguments.repetitions):
        ids = prompt_ids(arguments.tokens, engine.info.vocab_size)
        reply = ask(engine, ids)
        cold.append(reply.timings.prefill_s)
        for _ in range(1, NUM_TURNS):
            answer = [token.token_id for token in reply.tokens]
            ids = [*ids, *answer, *prompt_ids(NEW_TOKENS, engine.info.vocab_size)]
            reply = ask(engine, ids)
            warm.append(reply.timings.prefill_s)
            new = max(new, reply.usage.num_prompt_tokens - reply.usage.num_cached_tokens)
        again.append(ask(engine, ids).timings.prefill_s)
    floor = median(cold) * new / arguments.tokens
    lib.line(f"first turn, {arguments.tokens} tokens", median(cold) * 1e3, "ms", spread=[s * 1e3 for s in cold])
    told = f"turns 2 to {NUM_TURNS}, at most {new} computed"
    lib.line(told, median(warm) * 1e3, "ms", floor * 1e3, [s * 1e3 for s in warm])
    lib.line("the last turn asked again", median(again) * 1e3, "ms", spread=[s * 1e3 for s in again])
    lib.line("warm / cold", median(warm) / median(cold) * 100, "%", TARGET * 100)
    return {
        "cold_s": median(cold),
        "warm_s": median(warm),
        "retry_s": median(again),
        "warm_over_cold": median(warm) / median(cold),
        "new_tokens": new,
    }


def restarts(opened: Callable[[], troth.Engine], arguments: argparse.Namespace, cold_s: float) -> dict[str, float]:
    """The second turn of a conversation whose first one another process answered, told from when it was asked."""
    with opened() as engine:
        vocab_size = engine.info.vocab_size
        prompts = [prompt_ids(arguments.tokens, vocab_size) for _ in range(arguments.repetitions)]
        answers = [[token.token_id for token in ask(engine, ids).tokens] for ids in prompts]
    seconds, status = [], None
    for ids, answer in zip(prompts, answers, strict=True):
        with opened() as engine:
            reply = ask(engine, [*ids, *answer, *prompt_ids(NEW_TOKENS, vocab_size)])
            seconds.append(reply.timings.queued_s + reply.timings.prefill_s)
            status = engine.status().prefix_cache
    assert status is not None
    assert status.disk is not None
    restored = status.disk.num_restored_tokens
    lib.line(
        f"second turn after a restart, {restored} restored",
        median(seconds) * 1e3,
        "ms",
        spread=[s * 1e3 for s in seconds],
    )
    lib.line("after a restart / cold", median(seconds) / cold_s * 100, "%", TARGET * 100)
    lib.line("read and proved", status.disk.read_bytes_per_s / 2**20, "MiB/s")
    return {
        "restart_s": median(seconds),
        "restart_over_cold": median(seconds) / cold_s,
        "restored_tokens": restored,
        "read_bytes_per_s": status.disk.read_bytes_per_s,
        "disk_bytes": status.disk.num_bytes,
    }


def shared_system_prompt(engine: troth.Engine, arguments: argparse.Namespace) -> dict[str, float]:
    """Bytes that conversations with one system prompt keep, beside what they would keep each alone."""
    system = prompt_ids(arguments.system_tokens, engine.info.vocab_size)
    before = cached_bytes(engine)
    for _ in range(arguments.conversations):
        ask(engine, [*system, *prompt_ids(NEW_TOKENS, engine.info.vocab_size)], 2)
    kept = cached_bytes(engine) - before
    per_token = sum(group.bytes_per_block for group in engine.plan.groups) / 16
    apart = arguments.conversations * (arguments.system_tokens + NEW_TOKENS) * per_token
    lib.line(f"{arguments.conversations} conversations, kept", kept / 2**20, "MiB")
    lib.line("the same without sharing", apart / 2**20, "MiB")
    return {"shared_bytes": kept, "apart_bytes": apart}


def ask(engine: troth.Engine, ids: list[int], num_tokens: int = ANSWER_TOKENS) -> Reply:
    """A greedy answer of known length, with its tokens."""
    return engine.complete(ids, max_tokens=num_tokens, temperature=0, ignore_eos=True, logprobs=0)


def cached_bytes(engine: troth.Engine) -> int:
    """What the prompt cache holds."""
    status = engine.status().prefix_cache
    return 0 if status is None else status.cached_bytes


if __name__ == "__main__":
    main()
