"""``troth probe``: the findings as people and programs read them, with the evidence."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.shared_data import shared
from troth import compose
from troth.cli.main import main
from troth.config import env
from troth.text.chat_renderer import ChatRenderer
from troth.text.chat_template import ChatTemplate
from troth.text.probe_formats import RegistryReader
from troth.text.template_probe import probe_template


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def with_template(monkeypatch: pytest.MonkeyPatch, source: str | None) -> None:
    probe = None
    if source is not None:
        renderer = ChatRenderer(ChatTemplate(source, bos_token=None, eos_token=None))
        probe = probe_template(renderer, RegistryReader())
    monkeypatch.setattr(compose, "find", lambda options: SimpleNamespace(name="small"))
    monkeypatch.setattr(compose, "load_text", lambda artifact, options: SimpleNamespace(probe=probe))


def test_cli_probe_shows_what_was_proved_and_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_template(
        monkeypatch, "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    assert main(["probe", "small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: chats, system messages anywhere"
    assert any(line.split()[:2] == ["chat", "yes"] and "qvuserone" in line for line in lines)
    assert any(line.split()[:2] == ["tool_declarations", "no"] for line in lines)
    assert lines[-1] == "Form of messages: content parts."


def test_cli_probe_answers_no_for_a_template_that_cannot_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_template(monkeypatch, "{{ raise_exception('only for ranking') }}")
    assert main(["probe", "small"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("small: cannot chat\n")
    assert "only for ranking" in out


def test_cli_probe_says_what_to_do_without_a_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_template(monkeypatch, None)
    assert main(["probe", "small"]) == 1
    assert "small has no chat template; give one with --chat-template" in capsys.readouterr().out
    assert main(["probe", "small", "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert (value["template"], value["chat"], value["tools"]) == (False, False, False)


def test_cli_probe_of_a_real_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(shared("troth-tiny-hybrid")), "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (value["chat"], value["tools"], value["tool_format"]) == (True, True, "hermes")
    assert value["reasoning"]["markers"] == "think"
    assert value["thinking"]["off"] == {"enable_thinking": False}
    assert {item["capability"] for item in value["evidence"]} >= {"chat", "system", "tool_format", "thinking", "media"}
    assert all(item["shown"] for item in value["evidence"])
