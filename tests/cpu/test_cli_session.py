"""What the command line refuses of a real model before its weights are read."""

from __future__ import annotations

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
