"""llama.cpp's side of a comparison; runs in the peer's Python (llama-cpp-python). Arguments: model, threads, flash
0|1.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count

import llama_cpp

fresh = count()


def main() -> None:
    """Load, then answer figures until standard input ends."""
    path, threads, flash = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
    began = time.perf_counter()
    model = llama_cpp.Llama(
        path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, flash_attn=flash, n_batch=512, verbose=False
    )
    load_s = time.perf_counter() - began
    version = f"llama-cpp-python {llama_cpp.__version__}"
    print(json.dumps({"version": version, "flash_attention": flash, "load_s": load_s}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        measure = {"prefill": prefill, "decode": decode}[question["figure"]]
        print(json.dumps({"value": measure(model, question["tokens"])}), flush=True)


def prompt_ids(num_tokens: int) -> list[int]:
    """Ids no cache has seen."""
    number = next(fresh)
    return [5 + (7919 * number + 31 * i) % 1000 for i in range(num_tokens)]


def prefill(model: llama_cpp.Llama, num_tokens: int) -> float:
    """Prompt tokens per second; the logits of the last are ready when eval returns."""
    ids = prompt_ids(num_tokens)
    model.reset()
    began = time.perf_counter()
    model.eval(ids)
    return num_tokens / (time.perf_counter() - began)


def decode(model: llama_cpp.Llama, context: int, num_tokens: int = 48) -> float:
    """Greedy tokens per second after ``context`` prompt tokens: llama.cpp's own decode and argmax, end token
    ignored.
    """
    model.reset()
    model.eval(prompt_ids(context))
    sampler = llama_cpp.llama_sampler_init_greedy()
    token = llama_cpp.llama_sampler_sample(sampler, model.ctx, -1)
    began = time.perf_counter()
    for _ in range(num_tokens):
        model.eval([token])
        token = llama_cpp.llama_sampler_sample(sampler, model.ctx, -1)
    seconds = time.perf_counter() - began
    llama_cpp.llama_sampler_free(sampler)
    return num_tokens / seconds


if __name__ == "__main__":
    main()
