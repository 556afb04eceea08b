"""``troth serve`` with scripted answers instead of a model, in a process of its own.

Run as ``python -m tests.cli_server '{"engine": {...}, "factory": ...}' serve --port 0``: the engine is a FakeEngine in
a further process, everything else is the real command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from troth import compose
from troth.cli import serve, served
from troth.cli.main import main
from troth.contracts.capabilities import TemplateCapabilities
from troth.contracts.sampling import SamplingParams
from troth.errors import CapabilityUnavailable, ModelLoadError
from troth.runtime.isolate import ProcessEngineClient
from troth.serve.listen import Server
from troth.testing.byte_tokenizer import BytePrompts, ByteTokenizer
from troth.text.grammar import GrammarCompiler
from troth.text.object_cache import BoundedObjects

FAKE = "troth.testing.fake_engine:build_fake_engine"


def build_refusing(options: dict[str, Any], report: Any) -> Any:
    """A factory that cannot load."""
    raise ModelLoadError("does not fit: 2 bytes wanted, 1 usable", path="pebble.gguf")


def build_lacking(options: dict[str, Any], report: Any) -> Any:
    """A factory that is asked for what its model has not."""
    raise CapabilityUnavailable("speculation mtp", "its family has no draft heads", param="speculation")


def build_crashing(options: dict[str, Any], report: Any) -> Any:
    """A factory whose process dies."""
    import os

    os._exit(9)


def fake_text(*arguments: Any) -> Any:
    """A text side of bytes."""
    return SimpleNamespace(
        prompts=lambda context_tokens: BytePrompts(context_tokens),
        tokenizer=ByteTokenizer(),
        grammars=lambda vocab_size: GrammarCompiler(ByteTokenizer(), vocab_size),
        capabilities=TemplateCapabilities(),
        calls=None,
        beginnings=BoundedObjects(1000),
        defaults=SimpleNamespace(sampling=lambda **values: SamplingParams(**values)),
    )


def run(settings: dict[str, Any], arguments: list[str]) -> int:
    """The command's exit code."""
    seen = settings.get("seen")
    Server.grace_s = settings.get("grace_s", Server.grace_s)

    def engine_client(name: str, model: Any, engine: Any) -> ProcessEngineClient:
        if seen:
            Path(seen).write_text(json.dumps([name, repr(model), repr(engine)]))
        factory = settings.get("factory", FAKE)
        return ProcessEngineClient(factory, {"model": name, **settings.get("engine", {})}, name=name)

    compose.find = lambda options: SimpleNamespace(name="pebble")  # type: ignore[assignment,return-value]
    compose.load_text = fake_text
    served.engine_client = serve.engine_client = engine_client
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), sys.argv[2:]))
