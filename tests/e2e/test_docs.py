"""The Python examples in the documents, run with the demo model and a server of it, print what the documents say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.demo_server import DEADLINE_S
from tests.markdown import Document, Fence, documents
from tests.shared_data import shared
from troth.artifact.resolve import resolve

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("demo_model")]

ADDRESS = "http://127.0.0.1:8080"
"""Where the documents say that ``troth serve`` is."""
NO_MODEL = "troth.testing"
"""Python that imports this runs in ``tests/portable/test_docs_examples.py``."""
REVISION = "0123456789abcdef0123456789abcdef01234567"
TRAINED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def examples() -> list[object]:
    return [
        pytest.param(document, fence, id=f"{document.path.name}:{fence.line}")
        for document in map(Document.read, documents())
        for fence in document.fences("python")
        if NO_MODEL not in fence.text
    ]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the models that the examples name: a file, a folder, a repository of the Hugging Face cache."""
    trained = shared("troth-tiny-hybrid")
    folder = tmp_path / "models" / "my-model"
    snapshot = tmp_path / ".cache/huggingface/hub/models--org--my-model/snapshots" / REVISION
    for place in (folder, snapshot):
        place.mkdir(parents=True)
        for name in TRAINED_FILES:
            shutil.copyfile(trained / name, place / name)
    folder.with_suffix(".gguf").symlink_to(resolve(None).files[0].path)
    return tmp_path


@pytest.mark.parametrize(("document", "fence"), examples())
def test_python_in_a_document_prints_what_the_document_says(
    document: Document, fence: Fence, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = fence.text
    if ADDRESS in source:
        pytest.importorskip("openai")
        source = source.replace(ADDRESS, request.getfixturevalue("server").url)
    if "my-model" in source:
        request.getfixturevalue("home")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TROTH_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=tmp_path,
        env={**clean, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == document.output_of(fence)
