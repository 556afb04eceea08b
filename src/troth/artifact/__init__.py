"""Ring 1: what lies on disk, checked before anything is loaded. Standard library only.

A model's files are hostile until proved otherwise: every reader here returns or raises ModelLoadError, in
bounded time and memory. Start with ``resolve.py``; ``gguf.py`` and ``safetensors.py`` read weight headers.
"""
