"""Troth beside llama.cpp on the same GGUF, both of its attention settings, interleaved."""

from __future__ import annotations

from benchmarks.peers.compare import Setting, compare, parser

SETTINGS = (Setting("llama.cpp flash", ("1",)), Setting("llama.cpp no flash", ("0",)))

if __name__ == "__main__":
    compare("peer-llama-cpp", "llama_cpp_side.py", SETTINGS, parser(__doc__).parse_args())
