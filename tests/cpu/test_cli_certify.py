"""``troth certify`` from the files of a model to an engine that drafts: what it writes, and what it lets be loaded."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import troth
from tests.cpu.draft_heads import CONFIG, save_with_head
from tests.shared_data import shared
from troth.cli.main import main
from troth.cli.terminal import Terminal
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.speculation import Speculation
from troth.errors import CapabilityUnavailable
from troth.nn.draft_head import DraftHead
from troth.run import certification
from troth.text import certifying

ENGINE = EngineOptions(threads=1, max_rows=2, speculation=("mtp",))


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a head, and the tokenizer and template of a real one."""
    real, folder = shared("troth-tiny-hybrid"), tmp_path_factory.mktemp("head")
    known = json.loads((real / "config.json").read_text())
    sizes = {**CONFIG.to_dict(), "vocab_size": known["vocab_size"], "max_position_embeddings": 512}
    save_with_head(folder, config=transformers.Qwen3_5TextConfig(**sizes))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(real / name, folder)
    return folder


@pytest.fixture(autouse=True)
def _in_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(certification, "ANSWER_TOKENS", 8)
    monkeypatch.setattr(certifying, "QUESTIONS", certifying.QUESTIONS[1:2])


def certify(folder: Path) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    terminal = Terminal(stdin=io.StringIO(), stdout=out, stderr=io.StringIO())
    code = main(["certify", str(folder), "--threads", "1", "--json"], terminal)
    value: dict[str, Any] = json.loads(out.getvalue())
    return code, value


def test_certify_writes_what_lets_the_head_draft(folder: Path) -> None:
    options = ModelOptions(model=str(folder))
    with pytest.raises(CapabilityUnavailable, match=r"has no certificate for cpu in float32 .*; run troth certify /"):
        troth.Engine.open(model_options=options, engine_options=ENGINE)
    code, told = certify(folder)
    assert (code, told["certified"], told["findings"]["problems"]) == (0, True, [])
    assert json.loads(Path(told["path"]).read_text())["digest"] == told["digest"]
    with troth.Engine.open(model_options=options, engine_options=ENGINE) as engine:
        wanted = engine.complete("A reading room", max_tokens=8, temperature=0, speculation="off")
        drafted = Speculation(sources=("mtp",), depth=3, adaptive=False)
        reply = engine.complete("A reading room", max_tokens=8, temperature=0, speculation=drafted)
    assert [token.token_id for token in reply.tokens] == [token.token_id for token in wanted.tokens]
    assert reply.speculation is not None
    assert reply.speculation.num_drafted_by_source["mtp"] > 0
    assert not reply.speculation.uncertified


def test_certify_writes_nothing_of_a_head_that_computes_something_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    init = DraftHead.__init__

    def built(self: DraftHead, **parts: Any) -> None:
        init(self, **parts | {"hidden_norm_D": torch.ones_like(parts["hidden_norm_D"])})

    monkeypatch.setattr(DraftHead, "__init__", built)
    code, told = certify(folder)
    assert (code, told["certified"], told["path"]) == (1, False, None)
    assert "computed plainly" in told["findings"]["problems"][0]
    assert not list(tmp_path.rglob("*.json"))
