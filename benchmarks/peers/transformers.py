"""Troth beside transformers on the same file, in float32 and bfloat16, interleaved."""

from __future__ import annotations

from benchmarks.peers.compare import Setting, compare, parser

SETTINGS = (Setting("transformers float32", ("float32",)), Setting("transformers bfloat16", ("bfloat16",)))

if __name__ == "__main__":
    compare("peer-transformers", "transformers_side.py", SETTINGS, parser(__doc__).parse_args())
