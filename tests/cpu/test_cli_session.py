"""What the command line refuses of a real model before its weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.shared_data import shared
from troth import compose
from troth.cli.main import main

TOO_LONG = "maximum context length is 2048 tokens; the prompt has"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--max-tokens", "9999", "Hi"], TOO_LONG),
        (["run", "--raw", "word " * 3000], TOO_LONG),
        (["chat", "--max-tokens", "9999"], TOO_LONG),
        (["bench", "--prompt-tokens", "9999"], "take 10064 tokens, more than the context of 2048; ask for fewer"),
        (["bench", "--context", "64"], "take 577 tokens, more than the context of 64; ask for fewer"),
    ],
)
def test_session_refuses_what_no_engine_could_serve_before_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    for name in ("plan", "start_engine"):  # the first imports torch; whoever called one would fail otherwise
        monkeypatch.setattr(compose, name, None)
    assert main([*arguments, "-m", str(shared("troth-tiny-hybrid")), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "mamba9"}, "'mamba9' is not an architecture Troth computes"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_session_tells_first_what_keeps_a_model_from_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], told: str
) -> None:
    """It has no chat template either, and the answer would be too long."""
    folder = tmp_path / "model"
    shutil.copytree(shared("troth-tiny-hybrid"), folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    (config if "model_type" in changes else text).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    for template in folder.glob("*.jinja"):
        template.unlink()
    assert main(["run", "-m", str(folder), "--device", "cpu", "--max-tokens", "9999999", "Hi"]) == 2
    assert told in capsys.readouterr().err
