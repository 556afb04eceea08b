"""llama.cpp's side of batched decoding, as its server's parallel slots do it: one llama_decode call for a token of
every sequence. Runs in the peer's Python (llama-cpp-python). Arguments: model, threads, flash 0|1, most sequences, one
cache for all of them 0|1.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from itertools import count
from typing import Any

import llama_cpp

PROMPT_TOKENS = 16
TOKENS = 48
ROOM = 256
"""Cells of each sequence."""
FLASH_ON, FLASH_OFF = 1, 0
fresh = count()


def main() -> None:
    """Load, then answer figures until standard input ends."""
    path, threads, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[4])
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    began = time.perf_counter()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_seq_max = rows * ROOM, 512, rows
    settings.n_threads = settings.n_threads_batch = threads
    settings.flash_attn_type = FLASH_ON if sys.argv[3] == "1" else FLASH_OFF
    settings.kv_unified = sys.argv[5] == "1"
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        sys.exit("llama.cpp cannot make a context of these settings")
    about = {
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "flash_attention": sys.argv[3] == "1",
        "one_cache": sys.argv[5] == "1",
        "load_s": time.perf_counter() - began,
    }
    print(json.dumps(about), flush=True)
    batch = llama_cpp.llama_batch_init(max(rows * PROMPT_TOKENS, rows), 0, 1)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps({"value": tokens_per_s(context, batch, question["tokens"])}), flush=True)


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, user_data: Any) -> None:
    """Say nothing: standard output is for answers."""


def tokens_per_s(context: Any, batch: Any, rows: int) -> float:
    """Greedy tokens per second of ``rows`` sequences together, each after a prompt of its own; end tokens ignored."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    sampler = llama_cpp.llama_sampler_init_greedy()
    batch.n_tokens = 0
    for row in range(rows):
        ids = prompt_ids()
        for position, token in enumerate(ids):
            add(batch, token, position, row, wants_logits=position == len(ids) - 1)
    decode(context, batch)
    last = [row * PROMPT_TOKENS + PROMPT_TOKENS - 1 for row in range(rows)]
    tokens = [llama_cpp.llama_sampler_sample(sampler, context, place) for place in last]
    began = time.perf_counter()
    for step in range(TOKENS):
        batch.n_tokens = 0
        for row, token in enumerate(tokens):
            add(batch, token, PROMPT_TOKENS + step, row, wants_logits=True)
        decode(context, batch)
        tokens = [llama_cpp.llama_sampler_sample(sampler, context, row) for row in range(rows)]
    seconds = time.perf_counter() - began
    llama_cpp.llama_sampler_free(sampler)
    return rows * TOKENS / seconds


def prompt_ids() -> list[int]:
    """Ids no sequence has had."""
    number = next(fresh)
    return [5 + (7919 * number + 31 * i) % 1000 for i in range(PROMPT_TOKENS)]


def add(batch: Any, token: int, position: int, row: int, *, wants_logits: bool) -> None:
    """One token more in the batch."""
    at = batch.n_tokens
    batch.token[at], batch.pos[at], batch.logits[at] = token, position, wants_logits
    batch.n_seq_id[at] = 1
    batch.seq_id[at][0] = row
    batch.n_tokens = at + 1


def decode(context: Any, batch: Any) -> None:
    """Compute the batch."""
    if status := llama_cpp.llama_decode(context, batch):
        sys.exit(f"llama_decode returned {status}")


if __name__ == "__main__":
    main()
