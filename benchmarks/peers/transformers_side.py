"""transformers' side of a comparison; runs in the peer's Python. Arguments: model (.gguf or folder), threads, dtype."""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from pathlib import Path

import torch
import transformers

fresh = count()


def main() -> None:
    """Load, then answer figures until standard input ends."""
    path, threads, dtype = Path(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3])
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    began = time.perf_counter()
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where).eval()
    load_s = time.perf_counter() - began
    about = {"version": f"transformers {transformers.__version__}", "dtype": sys.argv[3], "load_s": load_s}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        measure = {"prefill": prefill, "decode": decode}[question["figure"]]
        print(json.dumps({"value": measure(model, question["tokens"])}), flush=True)


def prompt_ids(num_tokens: int) -> torch.Tensor:
    """Ids no cache has seen."""
    number = next(fresh)
    return torch.tensor([[5 + (7919 * number + 31 * i) % 1000 for i in range(num_tokens)]])


def prefill(model: torch.nn.Module, num_tokens: int) -> float:
    """Prompt tokens per second, with logits of the last position only."""
    ids = prompt_ids(num_tokens)
    began = time.perf_counter()
    model(ids, logits_to_keep=1, use_cache=True).logits.argmax(-1)
    return num_tokens / (time.perf_counter() - began)


def decode(model: torch.nn.Module, context: int, num_tokens: int = 48) -> float:
    """Greedy tokens per second after ``context`` prompt tokens, feeding the cache back by hand (faster than
    generate).
    """
    out = model(prompt_ids(context), logits_to_keep=1, use_cache=True)
    token = out.logits[:, -1:].argmax(-1)
    began = time.perf_counter()
    for _ in range(num_tokens):
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
    return num_tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
