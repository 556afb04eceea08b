"""How a figure is taken from an engine: the same for every benchmark and every peer comparison.

Prompts are token ids that no cache has seen, so that prefill is computed; decoding is greedy and ignores EOS, so that
the number of tokens is known.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count

from troth import Engine

_fresh = count()


def prompt_ids(num_tokens: int, vocab_size: int) -> list[int]:
    """Ids below the vocabulary, different on every call from the second id on: no block of two prompts is the same."""
    number, span = next(_fresh), min(1000, vocab_size - 10)
    return [5 + (7919 * number + (31 + number // span) * i) % span for i in range(num_tokens)]


def prefill_tokens_per_s(engine: Engine, num_tokens: int) -> float:
    """Prompt tokens over the seconds from leaving the queue to the first token."""
    reply = engine.complete(
        prompt_ids(num_tokens, engine.info.vocab_size), max_tokens=1, temperature=0, ignore_eos=True
    )
    return num_tokens / reply.timings.prefill_s


def decode_tokens_per_s(engine: Engine, context: int, num_tokens: int = 48) -> float:
    """Tokens after the first over the seconds they took, starting from ``context`` prompt tokens."""
    reply = engine.complete(
        prompt_ids(context, engine.info.vocab_size), max_tokens=num_tokens + 1, temperature=0, ignore_eos=True
    )
    return num_tokens / reply.timings.decode_s


def batch_tokens_per_s(engine: Engine, rows: int, context: int = 16, num_tokens: int = 48) -> float:
    """Tokens of ``rows`` requests together over the longest decode among them."""

    def one(_: int) -> float:
        ids = prompt_ids(context, engine.info.vocab_size)
        reply = engine.complete(ids, max_tokens=num_tokens + 1, temperature=0, ignore_eos=True)
        return reply.timings.decode_s

    with ThreadPoolExecutor(rows) as pool:
        return rows * num_tokens / max(pool.map(one, range(rows)))
