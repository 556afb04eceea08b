"""``troth bench`` over scripted answers: what is measured and shown, what is compared, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.cli_engine import EngineOpener
from troth.cli import session
from troth.cli.main import main
from troth.contracts.request import Request
from troth.testing.fake_answer import FakeAnswer


def install(monkeypatch: pytest.MonkeyPatch, opener: EngineOpener) -> EngineOpener:
    monkeypatch.setattr(session, "open_engine", opener)
    return opener


def test_bench_measures_every_figure_as_often_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = install(monkeypatch, EngineOpener("word " * 40))
    line = ["bench", "--json", "--prompt-tokens", "100", "--tokens", "9", "--repetitions", "2", "--rows", "3"]
    assert main(line) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["model"] == "scripted"
    assert [figure["name"] for figure in value["figures"]] == [
        "prompt of 100 tokens",
        "answer after 16 tokens",
        "answer after 100 tokens",
        "3 answers at once after 16 tokens",
    ]
    assert all(len(figure["tokens_per_s"]) == 2 for figure in value["figures"])
    assert value["speculation"] == []
    assert opener.thread.num_idle_pieces < 0, "kernels were still to be compiled"
    asked = opener.thread.requests
    assert [len(one.prompt_ids) for one in asked] == [16, 100, 16, 16, 16] * 3
    assert all(one.max_tokens == 10 and not one.prompt_cache and one.sampling.is_greedy for one in asked)
    assert len({one.prompt_ids for one in asked[2:5]}) == 3
    assert opener.thread.is_closed


def test_bench_compares_exercises_with_drafts_and_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = install(monkeypatch, EngineOpener("word " * 40))
    assert main(["bench", "--tokens", "9", "--repetitions", "1", "--speculate", "ngram"]) == 0
    out = capsys.readouterr().out
    assert "copying a program: " in out
    assert "answering a question, drafted" in out
    assert sum(one.speculation is None for one in opener.thread.requests) >= 4


def test_bench_fails_where_drafts_change_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(request: Request) -> FakeAnswer:
        is_off = request.speculation is not None and not request.speculation.sources
        return FakeAnswer(text="right" if is_off else "wrong")

    install(monkeypatch, EngineOpener(script))
    assert main(["bench", "--tokens", "9", "--repetitions", "1", "--speculate", "ngram"]) == 1
    assert "copying a program: the answer with drafts differs from the one without" in capsys.readouterr().err


def test_bench_refuses_what_the_context_cannot_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = install(monkeypatch, EngineOpener("x", context_tokens=100))
    for prompt_tokens, tokens in ((90, 10), (1, 84)):
        assert main(["bench", "--prompt-tokens", str(prompt_tokens), "--tokens", str(tokens)]) == 2
        assert "take 101 tokens, more than the context of 100; ask for fewer" in capsys.readouterr().err
    assert opener.options == []


def test_bench_refuses_what_memory_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model may be made for more tokens than its engine turns out to hold."""
    opener = install(monkeypatch, EngineOpener("x", context_tokens=100, declared_tokens=200))
    assert main(["bench", "--prompt-tokens", "90", "--tokens", "10"]) == 2
    assert "take 101 tokens, more than the context of 100; ask for fewer" in capsys.readouterr().err
    assert opener.thread.is_closed
