"""Troth beside llama.cpp with several answers at once on the same GGUF: 4 and 8 rows against as many sequences.

All of the peer's settings that matter: flash attention on and off, one cache for all sequences or one for each.
"""

from __future__ import annotations

from itertools import product

from benchmarks.peers.compare import Setting, compare, parser

ROWS = (4, 8)
FIGURES = {f"decode_batch{rows}": ("batch", rows) for rows in ROWS}
SETTINGS = tuple(
    Setting(
        f"llama.cpp {'flash' if flash else 'no flash'}, {'one cache' if unified else 'a cache each'}",
        (str(flash), str(max(ROWS)), str(unified)),
    )
    for flash, unified in product((1, 0), (1, 0))
)

if __name__ == "__main__":
    compare("peer-llama-cpp-batch", "llama_cpp_batch_side.py", SETTINGS, parser(__doc__).parse_args(), FIGURES)
