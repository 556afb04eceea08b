"""``troth chat`` over scripted answers: what is remembered, what is said, and how one leaves."""

from __future__ import annotations

import builtins
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.cli_engine import EngineOpener, Person
from troth.cli import session
from troth.cli.conversation import Conversation
from troth.cli.main import main
from troth.contracts.events import Event, Failed, Segment
from troth.contracts.request import Request
from troth.testing.fake_answer import FakeAnswer

PRESS = "<Ctrl-C>"


def chat_script(monkeypatch: pytest.MonkeyPatch, opener: EngineOpener, lines: str, *arguments: str) -> int:
    """Run the chat with piped input."""
    monkeypatch.setattr(session, "open_engine", opener)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", *arguments])


def chat_person(
    monkeypatch: pytest.MonkeyPatch, opener: EngineOpener, lines: list[str], *arguments: str
) -> tuple[int, str, str]:
    """Run the chat with a person who types ``lines``, then Ctrl-D; (exit code, stdout, stderr)."""
    typed: Iterator[str] = iter(lines)

    def type_line(prompt: str) -> str:
        assert prompt == "> "
        line = next(typed, None)
        if line is None:
            raise EOFError
        if line == PRESS:
            raise KeyboardInterrupt
        return line

    out, err = Person(), io.StringIO()
    monkeypatch.setattr(session, "open_engine", opener)
    monkeypatch.setattr(builtins, "input", type_line)
    monkeypatch.setattr(sys, "stdin", Person())
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return main(["chat", *arguments]), out.getvalue(), err.getvalue()


def test_conversation_keeps_reasoning_for_the_template_to_judge() -> None:
    conversation = Conversation()
    conversation.add("Why?", "Because.", "Hm.")
    conversation.add("And?", "So.")
    first, second = conversation.asking("What?")[1], conversation.asking("What?")[3]
    assert first == {"role": "assistant", "content": "Because.", "reasoning_content": "Hm."}
    assert second == {"role": "assistant", "content": "So."}


def numbered() -> Callable[[Request], FakeAnswer]:
    count = 0

    def script(request: Request) -> FakeAnswer:
        nonlocal count
        count += 1
        return FakeAnswer(text=f"answer {count}")

    return script


def test_chat_answers_each_line_with_all_that_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = EngineOpener(numbered())
    assert chat_script(monkeypatch, opener, "one\n\n  \ntwo", "--system", "Be.") == 0
    assert capsys.readouterr() == ("answer 1\nanswer 2\n", "")
    assert opener.prompt() == "system: Be.\nuser: one\nassistant: answer 1\nuser: two\nassistant: "
    assert opener.thread.is_closed


def test_chat_hands_sampling_and_model_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = EngineOpener()
    assert chat_script(monkeypatch, opener, "one\n", "my/model", "--temperature", "0", "--max-tokens", "2") == 0
    assert opener.thread.requests[0].sampling.is_greedy
    assert opener.thread.requests[0].max_tokens == 2
    assert opener.options[0].model == "my/model"


def test_chat_obeys_clear_undo_and_system(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opener = EngineOpener(numbered())
    lines = "one\ntwo\n/undo\n/system  Be kind. \nthree\n/system\n/CLEAR\nfour\n/undo\n/undo\n"
    assert chat_script(monkeypatch, opener, lines) == 0
    assert opener.prompt(2) == "system: Be kind.\nuser: one\nassistant: answer 1\nuser: three\nassistant: "
    assert opener.prompt(3) == "user: four\nassistant: "
    assert capsys.readouterr().err.splitlines() == [
        "The last turn is forgotten; 1 left.",
        "The system message is set.",
        "The system message is removed.",
        "The conversation is forgotten.",
        "The last turn is forgotten; 0 left.",
        "Nothing was said yet.",
    ]


def test_chat_leaves_at_quit(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = EngineOpener()
    assert chat_script(monkeypatch, opener, "one\n/quit\ntwo\n") == 0
    assert len(opener.thread.requests) == 1


def test_chat_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat_script(monkeypatch, EngineOpener(), "/help\n") == 0
    text = capsys.readouterr().err
    assert all(name in text for name in ("/system", "/undo", "/clear", "/quit", "/help"))


@pytest.mark.parametrize(("line", "asked"), [("/etc/hosts is what?", "/etc/hosts is what?"), ("//help me", "/help me")])
def test_chat_asks_lines_that_only_look_like_commands(monkeypatch: pytest.MonkeyPatch, line: str, asked: str) -> None:
    opener = EngineOpener()
    assert chat_script(monkeypatch, opener, line) == 0
    assert opener.prompt() == f"user: {asked}\nassistant: "


def test_chat_script_ends_at_an_unknown_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = EngineOpener()
    assert chat_script(monkeypatch, opener, "/clean\none\n") == 2
    assert "/clean is no command; /help lists them" in capsys.readouterr().err
    assert opener.thread.requests == []


def test_chat_person_goes_on_after_an_unknown_command(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = chat_person(monkeypatch, EngineOpener("yes"), ["/clean", "one"])
    assert code == 0
    assert out == "yes\n\n"
    assert err.splitlines()[0] == "scripted, 8,192 tokens of context. /help for help."
    assert err.splitlines()[1].startswith("/clean is no command")


def test_chat_says_when_the_context_is_full_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = EngineOpener("ok", context_tokens=60)
    lines = ["one", "x" * 60, "two"]
    code, out, err = chat_person(monkeypatch, opener, lines)
    assert code == 0
    assert out == "ok\nok\n\n"
    assert "The context is full: the conversation has 102 tokens and 1 more are wanted for the answer, of 60." in err
    assert "/undo" in err
    assert opener.prompt() == "user: one\nassistant: ok\nuser: two\nassistant: "


def test_chat_script_ends_when_the_context_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat_script(monkeypatch, EngineOpener(context_tokens=40), "x" * 60) == 2
    assert capsys.readouterr().err.startswith("troth: The context is full")


def test_chat_says_when_the_context_is_full_before_the_engine_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The prompt builder refuses at once what is much too long; it must read the same."""
    monkeypatch.setattr(EngineOpener, "early_limit", 40)
    assert chat_script(monkeypatch, EngineOpener(context_tokens=40), "x" * 60) == 2
    assert capsys.readouterr().err.startswith("troth: The context is full")


def test_chat_says_why_an_answer_was_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat_script(monkeypatch, EngineOpener("long answer"), "one", "--max-tokens", "4") == 0
    assert capsys.readouterr() == ("long\n", "The answer was cut at --max-tokens 4.\n")
    assert chat_script(monkeypatch, EngineOpener("long answer", context_tokens=27), "one") == 0
    out, err = capsys.readouterr()
    assert out == "long a\n"
    assert err.startswith("The answer was cut: the context of 27 tokens is full.")


def test_chat_forgets_a_question_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = EngineOpener("")
    assert chat_script(monkeypatch, opener, "one\ntwo\n") == 0
    assert opener.prompt() == "user: two\nassistant: "
    assert capsys.readouterr().err.count("There was no answer; the question is forgotten.") == 2


def test_chat_keeps_what_was_said_before_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = EngineOpener("abcdefgh", on_event=press_once_at("c"))
    code, out, err = chat_person(monkeypatch, opener, ["one", "two"])
    assert code == 0
    said = out.splitlines()[0]
    assert "abc" in said
    assert said != "abcdefgh"
    assert opener.prompt() == f"user: one\nassistant: {said}\nuser: two\nassistant: "
    assert "Stopped. Ctrl-C again leaves." in err


def test_chat_leaves_at_ctrl_c_after_a_stopped_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = EngineOpener("abcdefgh", on_event=press_once_at("c"))
    code, _, _ = chat_person(monkeypatch, opener, ["one", PRESS, "two"])
    assert code == 130
    assert len(opener.thread.requests) == 1
    assert opener.thread.is_closed


def test_chat_leaves_at_the_second_ctrl_c_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = EngineOpener("ok")
    code, out, err = chat_person(monkeypatch, opener, [PRESS, "one", PRESS, PRESS, "two"])
    assert code == 130
    assert out == "\nok\n\n\n"
    assert err.count("Ctrl-C again or Ctrl-D leaves.") == 2
    assert len(opener.thread.requests) == 1


def test_chat_script_ends_at_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = EngineOpener("abcdefgh", on_event=press_once_at("c"))
    assert chat_script(monkeypatch, opener, "one\ntwo\n") == 130
    assert len(opener.thread.requests) == 1


def test_chat_person_goes_on_after_a_failed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([FakeAnswer(failure=Failed(kind="DeviceError", message="broken")), FakeAnswer(text="fine")])
    opener = EngineOpener(lambda request: next(answers))
    code, out, err = chat_person(monkeypatch, opener, ["one", "two"])
    assert (code, out) == (0, "fine\n\n")
    assert "broken" in err
    assert opener.prompt() == "user: two\nassistant: "


def test_conversation_remembers_turns_in_order() -> None:
    conversation = Conversation("be")
    conversation.add("q1", "a1")
    conversation.add("q2", "a2")
    assert len(conversation) == 2
    assert [message["content"] for message in conversation.asking("q3")] == ["be", "q1", "a1", "q2", "a2", "q3"]
    assert [message["role"] for message in conversation.asking("q3")] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert conversation.undo()
    conversation.clear()
    assert not conversation.undo()
    assert [message["content"] for message in conversation.asking("q3")] == ["be", "q3"]


def press_once_at(letter: str) -> Callable[[Event], None]:
    """Sends SIGINT when the first answer says ``letter``, and waits for the stop to arrive."""
    pressed = False

    def on_event(event: Event) -> None:
        nonlocal pressed
        if isinstance(event, Segment) and event.text == letter and not pressed:
            pressed = True
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.05)

    return on_event


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--thinking"], "thinking is not available"),
        (["--reasoning-budget", "5"], "a reasoning budget is not available"),
        (["--max-tokens", "9000"], "maximum context length is 8192 tokens"),
    ],
)
def test_chat_refuses_before_loading_what_no_turn_could_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    """With an interactive terminal every turn was refused in turn, after the weights had been read."""
    opener = EngineOpener()
    assert chat_script(monkeypatch, opener, "", *flags) == 2
    assert told in capsys.readouterr().err
    assert opener.options == []
