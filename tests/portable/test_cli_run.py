"""``troth run`` over scripted answers: what is asked, what is printed where, and how it ends."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import sys
import time

import pytest

from tests.cli_engine import EngineOpener, Person
from troth.cli import session
from troth.cli.main import main
from troth.contracts.capabilities import ReasoningCapability, TemplateCapabilities
from troth.contracts.events import Event, Failed, Segment
from troth.errors import CapabilityUnavailable
from troth.testing.byte_tokenizer import BytePrompts
from troth.testing.fake_answer import FakeAnswer


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> EngineOpener:
    return install(monkeypatch, EngineOpener("Paris."))


def install(monkeypatch: pytest.MonkeyPatch, opener: EngineOpener) -> EngineOpener:
    monkeypatch.setattr(session, "open_engine", opener)
    return opener


def test_run_prints_the_answer_alone_on_stdout(opener: EngineOpener, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "What is the capital of France?"]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert opener.prompt() == "user: What is the capital of France?\nassistant: "
    assert opener.thread.is_closed
    assert "answer 7 tokens" in err
    assert f"prompt {len(opener.prompt())} tokens" in err
    assert f"seed {opener.thread.requests[0].sampling.seed}" in err


@pytest.mark.parametrize(
    ("answer", "flags", "context_tokens", "told"),
    [
        (FakeAnswer(text="long " * 9), ["--max-tokens", "4"], 999, "The answer was cut at --max-tokens 4.\n"),
        (FakeAnswer(text="long " * 9), [], 27, "The answer was cut: the context of 27 tokens is full.\n"),
        (
            FakeAnswer(text="x", reasoning="hm " * 9),
            ["--max-tokens", "4"],
            999,
            "Reasoning took all 4 tokens; --max-to",
        ),
        (FakeAnswer(text="x", reasoning="hm " * 9), [], 27, "Reasoning took all 7 tokens; --context gives the answer"),
        (FakeAnswer(text="long " * 9), ["--max-tokens", "6"], 27, "The answer was cut at --max-tokens 6.\n"),
    ],
)
def test_run_tells_that_an_answer_is_not_whole(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: FakeAnswer,
    flags: list[str],
    context_tokens: int,
    told: str,
) -> None:
    """Of an answer that was all reasoning nothing came, and nobody said why."""
    marks = ReasoningCapability(markers="think", open="<think>", close="</think>", kept="all")
    able = TemplateCapabilities(chat=True, reasoning=marks)
    install(monkeypatch, EngineOpener(answer, context_tokens=context_tokens, capabilities=able))
    assert main(["run", *flags, "Hi"]) == 0
    assert capsys.readouterr().err.startswith(told)


def test_run_quiet_prints_nothing_else(opener: EngineOpener, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-q", "Hi"]) == 0
    assert capsys.readouterr() == ("Paris.\n", "")


def test_run_json_prints_one_object(opener: EngineOpener, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json", "--seed", "7", "Hi"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert set(value) == {"text", "reasoning", "finish_reason", "usage", "timings", "seed", "model"}
    assert (value["text"], value["finish_reason"], value["seed"], value["model"]) == ("Paris.", "stop", 7, "scripted")
    assert value["usage"]["num_completion_tokens"] == 7


def test_run_shows_reasoning_dim_to_a_person_and_in_json_alone_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, EngineOpener(FakeAnswer(reasoning="Hm\x1b.", text="Paris.")))
    assert main(["run", "-q", "Hi"]) == 0
    assert capsys.readouterr() == ("Paris.\n", "")
    assert main(["run", "-q", "--json", "Hi"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["reasoning"], value["text"]) == ("Hm\x1b.", "Paris.")
    person = Person()
    monkeypatch.setattr(sys, "stdout", person)
    assert main(["run", "-q", "Hi"]) == 0
    shown = person.getvalue()
    assert "".join(re.findall("\x1b\\[2m(.*?)\x1b\\[22m", shown)) == "Hm\u241b."
    assert shown.endswith("\x1b[22m\n\nParis.\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--thinking", "--no-thinking"], "contradict each other"),
        (["--raw", "--no-thinking"], "--raw leaves out"),
        (["--thinking"], "thinking is not available"),
        (["--reasoning-budget", "5"], "a reasoning budget is not available"),
    ],
)
def test_run_refuses_thinking_that_cannot_be(
    opener: EngineOpener, capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert main(["run", "-q", *flags, "Hi"]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "--chat-template" not in err
    assert opener.options == []


def test_run_hands_what_is_said_about_thinking_on(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = ReasoningCapability(markers="think", open="<think>", close="</think>", kept="all")
    able = TemplateCapabilities(chat=True, reasoning=marks)
    opener = install(monkeypatch, EngineOpener("Paris.", capabilities=able))
    for flags, budget in ((["--no-thinking"], 0), (["--reasoning-budget", "7"], 7), ([], None)):
        assert main(["run", "-q", *flags, "Hi"]) == 0
        reading = opener.thread.requests[-1].reading
        assert reading is not None
        assert reading.reasoning_budget == budget


def test_run_hands_every_sampling_flag_on(opener: EngineOpener) -> None:
    line = "run --max-tokens 3 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 9 --stop a --stop b Hi"
    assert main(line.split()) == 0
    request = opener.thread.requests[0]
    assert (request.max_tokens, request.stop) == (3, ("a", "b"))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5,
        0.9,
        40,
        0.1,
        9,
    )


def test_run_asks_with_the_system_message(opener: EngineOpener) -> None:
    assert main(["run", "--system", "Be brief.", "Hi"]) == 0
    assert opener.prompt() == "system: Be brief.\nuser: Hi\nassistant: "


def test_run_raw_leaves_the_template_out(opener: EngineOpener) -> None:
    assert main(["run", "--raw", "Once upon"]) == 0
    assert opener.prompt() == "Once upon"


@pytest.mark.parametrize("arguments", [["run"], ["run", "-"]])
def test_run_reads_the_prompt_from_stdin(
    opener: EngineOpener, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert main(arguments) == 0
    assert opener.prompt() == "user: two\nlines\nassistant: "


def test_run_raw_keeps_every_byte_of_stdin(opener: EngineOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("line\n\n"))
    assert main(["run", "--raw"]) == 0
    assert opener.prompt() == "line\n\n"


def test_run_prefers_the_argument_over_stdin(opener: EngineOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert main(["run", "typed"]) == 0
    assert "typed" in opener.prompt()
    assert sys.stdin.read() == "piped"


@pytest.mark.parametrize(
    ("arguments", "stdin", "told"),
    [
        (["run"], Person(""), "no prompt: give one"),
        (["run"], io.StringIO("\n"), "the prompt is empty"),
        (["run", "--raw", "--system", "x", "Hi"], io.StringIO(), "--system needs the chat template"),
        (["run", "--temperature", "200", "Hi"], io.StringIO(), "temperature must be between 0 and 100, not 200.0"),
        (["run", "--stop", "", "Hi"], io.StringIO(), "--stop: must not be empty"),
        (["run"], io.TextIOWrapper(io.BytesIO(b"ok\n\xff\n")), "standard input is not UTF-8: line 2"),
    ],
)
def test_run_refuses_before_loading(
    opener: EngineOpener,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    stdin: io.TextIOBase,
    told: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("troth: ")
    assert told in err
    assert err.count("\n") == 1
    assert opener.options == []


def test_run_loads_for_one_row_unless_told(opener: EngineOpener) -> None:
    assert main(["run", "-m", "some/model", "--kv-dtype", "bfloat16", "--threads", "3", "Hi"]) == 0
    model, engine = opener.options
    assert (model.model, model.kv_dtype) == ("some/model", "bfloat16")
    assert (engine.max_rows, engine.threads) == (1, 3)


def test_run_ends_the_line_and_tells_why_when_the_engine_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = Failed(kind="DeviceError", message="the device is on fire")
    opener = install(monkeypatch, EngineOpener(FakeAnswer(text="Par", failure=failure, fail_at=3)))
    assert main(["run", "--max-tokens", "6", "Hi"]) == 1
    assert capsys.readouterr() == ("Par\n", "troth: the device is on fire\n")
    assert opener.thread.is_closed


def test_run_tells_a_prompt_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = install(monkeypatch, EngineOpener(context_tokens=64))
    for arguments in (["x" * 50], ["--raw", "x" * 64], ["--max-tokens", "60", "Hi"]):
        assert main(["run", *arguments]) == 2
        assert "maximum context length is 64 tokens" in capsys.readouterr().err
    assert opener.options == []


def test_run_tells_a_prompt_for_which_memory_has_no_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = install(monkeypatch, EngineOpener(context_tokens=16, declared_tokens=99))
    assert main(["run", "x" * 50]) == 2
    assert "maximum context length is 16 tokens" in capsys.readouterr().err
    assert opener.options


def test_run_stops_at_ctrl_c_and_keeps_what_was_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opener = install(monkeypatch, EngineOpener("abcdef" * 100, on_event=interrupt_after("abc")))
    before = signal.getsignal(signal.SIGINT)
    assert main(["run", "--max-tokens", "600", "Hi"]) == 130
    out, err = capsys.readouterr()
    assert out.startswith("abc")
    assert len(out) < 600
    assert "Traceback" not in err
    assert opener.thread.num_cancelled == 1
    assert opener.thread.is_closed
    assert signal.getsignal(signal.SIGINT) is before


def test_run_json_tells_an_interrupted_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, EngineOpener("abcdef" * 100, on_event=interrupt_after("abc")))
    assert main(["run", "--json", "--max-tokens", "600", "Hi"]) == 130
    value = json.loads(capsys.readouterr().out)
    assert value["finish_reason"] == "aborted"
    assert value["text"].startswith("abc")


def test_run_leaves_at_once_at_a_second_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice(event: Event) -> None:
        if isinstance(event, Segment):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    opener = install(monkeypatch, EngineOpener("abcdef", on_event=twice))
    assert main(["run", "Hi"]) == 130
    assert capsys.readouterr() == ("a\n", "")
    assert opener.thread.is_closed


def test_run_ends_quietly_when_nobody_reads(opener: EngineOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["run", "Hi"]) == 141
    assert errors.getvalue() == ""
    assert opener.thread.is_closed
    assert opener.thread.num_cancelled == 1


def test_run_shows_no_control_characters_to_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EngineOpener("a\x1b]0;title\x07\tb\n"))
    person = Person()
    monkeypatch.setattr(sys, "stdout", person)
    assert main(["run", "Hi"]) == 0
    assert person.getvalue() == "a␛]0;title␇\tb\n"


def test_run_pipes_every_character_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, EngineOpener("a\x1b[1m\r\n"))
    assert main(["run", "Hi"]) == 0
    assert capsys.readouterr().out == "a\x1b[1m\r\n"


def interrupt_after(text: str):  # type: ignore[no-untyped-def]
    """Sends SIGINT once, when the answer has reached ``text``, and waits for the stop to arrive."""
    said = ""

    def on_event(event: Event) -> None:
        nonlocal said
        if isinstance(event, Segment) and said != text:
            said += event.text
            if said == text:
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.05)

    return on_event


def test_run_keeps_the_engines_log_to_itself_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine logs a failure with its traceback; a person is told once, in one line."""
    monkeypatch.setattr(logging.getLogger("troth"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("troth"), "propagate", False)

    def log_it(event: Event) -> None:
        if isinstance(event, Segment):
            logging.getLogger("troth").error("the engine loop failed")

    install(monkeypatch, EngineOpener("a", on_event=log_it))
    assert main(["run", "-q", "Hi"]) == 0
    assert capsys.readouterr().err == ""
    logging.getLogger("troth").handlers.clear()
    assert main(["--debug", "run", "-q", "Hi"]) == 0
    assert "the engine loop failed" in capsys.readouterr().err


def test_run_says_what_to_do_when_the_model_knows_no_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_template(*arguments: object, **named: object) -> None:
        raise CapabilityUnavailable("chat", "this model has no chat template")

    opener = install(monkeypatch, EngineOpener())
    monkeypatch.setattr(BytePrompts, "chat", no_template)
    assert main(["run", "Hi"]) == 2
    assert opener.options == []
    err = capsys.readouterr().err
    assert err.startswith("troth: chat is not available: this model has no chat template. Here: --chat-template FILE")
    assert main(["run", "-q", "--raw", "Hi"]) == 0
