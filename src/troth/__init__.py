"""Troth: a local LLM inference runtime that keeps its word.

Example::

    with troth.Engine.open("model.gguf") as engine:
        print(engine.chat("What is the capital of France?", temperature=0).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troth.answer_stream import AnswerStream, Reply
    from troth.library import Engine

__version__ = "0.1.0"
__all__ = ["AnswerStream", "Engine", "Reply", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `troth --help` and the server's process must not pay for the engine's imports.
    if name == "Engine":
        from troth.library import Engine

        return Engine
    if name in ("AnswerStream", "Reply"):
        from troth import answer_stream

        return getattr(answer_stream, name)
    raise AttributeError(f"module 'troth' has no attribute {name!r}")
