"""Which tests run beside no other: those that a busy machine could fail (``make test``)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

ALONE: Final = {
    "cpu/test_op_threads.py",
    "cpu/test_step_cost.py",
    "cpu/test_weights_quantized.py",
    "portable/test_artifact_gguf.py",
    "portable/test_classifier_hostile.py",
    "portable/test_draft_sources.py",
    "portable/test_grammar_schema.py",
    "portable/test_serve_hostile.py",
    "portable/test_tool_calls.py",
}
"""Files whose tests count time or memory. Those that start processes wait for what they want to see instead."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix() in ALONE:
            item.add_marker(pytest.mark.alone)
