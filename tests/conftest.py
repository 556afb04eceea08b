"""Which tests run beside others: all that neither watch the clock, count work nor start processes (``make test``)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

ALONE: Final = {
    "cpu/test_disk_cache_shared.py",
    "cpu/test_disk_tier.py",
    "cpu/test_op_threads.py",
    "cpu/test_weights_quantized.py",
    "portable/test_artifact_gguf.py",
    "portable/test_classifier_hostile.py",
    "portable/test_cli_chat.py",
    "portable/test_cli_main.py",
    "portable/test_cli_progress.py",
    "portable/test_cli_run.py",
    "portable/test_cli_serve.py",
    "portable/test_draft_sources.py",
    "portable/test_engine_thread.py",
    "portable/test_grammar_schema.py",
    "portable/test_isolate.py",
    "portable/test_library.py",
    "portable/test_serve_hostile.py",
    "portable/test_serve_stream.py",
    "portable/test_tool_calls.py",
}
"""Files whose tests a busy machine could fail; those of ``e2e`` all are such."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    here = Path(__file__).parent
    for item in items:
        file = item.path.relative_to(here).as_posix()
        if file in ALONE or file.startswith("e2e/"):
            item.add_marker(pytest.mark.alone)
