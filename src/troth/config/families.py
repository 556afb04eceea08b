"""Which architectures Troth computes, as names alone: readable without torch.

The families themselves are in ``models/``; ``models/registry.py`` imports them by these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FAMILIES: Final[Mapping[str, str]] = {
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "lfm2": "lfm2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
}
"""Hugging Face ``model_type`` -> module in ``troth.models``."""

GGUF_FAMILIES: Final[Mapping[str, str]] = {
    "gemma3": "gemma3",
    "lfm2": "lfm2",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
"""GGUF ``general.architecture`` -> module in ``troth.models``."""
