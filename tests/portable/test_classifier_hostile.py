"""Answers that try to cost time or memory, to lose text, or to smuggle a call in: bounded work, and all text stays."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest

from tests.portable.tool_corpus import read
from tests.portable.tool_examples import CHANNEL_EXAMPLES, COMPILED, EXAMPLES, POLICY, channel_form
from troth.contracts.tools import ToolCallDelta
from troth.text.classifier import Classifier, Reply, ReplyFormat
from troth.text.tool_calls import MAX_ARGUMENT_CHARACTERS, MAX_CALLS
from troth.text.tool_formats import FORMATS

HERMES = ReplyFormat.named(tools="hermes", reasoning="think")
NAMES = sorted(FORMATS)
# One format of each body; the others differ in markers alone.
BODIES = ("hermes", "function_tags", "argument_pairs", "gemma4", "lfm2", "deepseek", "kimi_k2", "kimi_k3", "minimax_m3")
BARE = ("llama3_json", "json_list", "pythonic", "mistral")


def reply_to(raw: str, form: ReplyFormat = HERMES) -> Reply:
    return read(Classifier(form, tools=COMPILED), raw)


def work_of(action: Callable[[], object]) -> int:
    """Python calls and C calls that ``action`` makes: a measure that no other load on the machine changes."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def pushed(name: str, text: str, size: int) -> int:
    """Push ``text`` in pieces; the most characters that were ever waiting unread."""
    classifier = Classifier(ReplyFormat.named(tools=name, reasoning="think"), tools=COMPILED)
    most = 0
    for start in range(0, len(text), size):
        classifier.push(text[start : start + size])
        reader = classifier._reader._reader
        most = max(most, len(reader._text) - reader._at)
    classifier.flush()
    return most


@pytest.mark.parametrize("name", [*BODIES, *BARE])
def test_classifier_reads_long_arguments_in_linear_work_and_little_memory(name: str) -> None:
    start, end = EXAMPLES[name].split("Paris")
    long, longer = (start + "Paris é <b> " * count + end for count in (100, 200))
    pushed(name, long, 5)  # what is made once and kept is no part of the work
    assert work_of(lambda: pushed(name, longer, 5)) < 2.2 * work_of(lambda: pushed(name, long, 5))
    assert pushed(name, longer, 5) < 700


@pytest.mark.parametrize("name", [*BODIES, *BARE])
def test_classifier_reads_openings_without_end_in_linear_work(name: str) -> None:
    for mark in {*FORMATS[name].entries, EXAMPLES[name][:-1], *FORMATS[name].bare, "<", "\n"}:
        once = work_of(lambda mark=mark: pushed(name, mark * 15, 4))  # type: ignore[misc]
        assert work_of(lambda mark=mark: pushed(name, mark * 30, 4)) < 2.3 * once + 2000  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(CHANNEL_EXAMPLES))
def test_classifier_reads_many_parts_in_linear_work(name: str) -> None:
    form, tail = channel_form(name)
    assert form.channels is not None
    marks = (*form.channels.starts, *form.channels.ends, form.channels.header_end)
    whole = f"{form.channels.starts[0]}{CHANNEL_EXAMPLES[name]}"
    for mark in (*(f"{mark}x" for mark in marks), whole):

        def pushed_to_channels(count: int, mark: str = mark) -> None:
            classifier = Classifier(form, tools=COMPILED, prompt_tail=tail)
            for _ in range(count):
                classifier.push(mark)
            classifier.flush()

        once = work_of(lambda run=pushed_to_channels: run(100))  # type: ignore[misc]
        assert work_of(lambda run=pushed_to_channels: run(200)) < 2.3 * once + 2000  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_classifier_shows_nested_openings(name: str) -> None:
    form = ReplyFormat.named(tools=name)
    opening = EXAMPLES[name][: EXAMPLES[name].index("Paris")]
    raw = opening * 3
    reply = read(Classifier(form, tools=COMPILED), raw)
    assert (reply.text, reply.calls) == (raw, [])


def test_classifier_accepts_a_call_behind_prose_about_markers() -> None:
    reply = reply_to(f"Write `<tool_call>` and `</tool_call>`.\n<tool_call> is a tag. {EXAMPLES['hermes']}")
    assert reply.text == "Write `<tool_call>` and `</tool_call>`.\n<tool_call> is a tag. "
    assert (len(reply.calls), reply.errors) == (1, [])


def test_classifier_shows_tags_in_a_code_block() -> None:
    raw = "```xml\n<tool_call>\n  <name>f</name>\n</tool_call>\n```\n```\n<function=x>\n```"
    for name in ("hermes", "function_tags", "argument_pairs"):
        reply = reply_to(raw, ReplyFormat.named(tools=name))
        assert (reply.text, reply.calls, reply.errors) == (raw, [], [])


def test_classifier_takes_no_call_from_the_data_of_a_broken_one() -> None:
    inner = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    raw = f'<tool_call>{{"name": "f", "arguments": {{"city": "a" broken "{inner}"}}}}</tool_call>'
    reply = reply_to(raw)
    assert reply.calls == []
    assert reply.text == raw
    assert [error.reason for error in reply.errors] == ["arguments_not_json"]


def test_classifier_takes_no_call_from_the_arguments_of_another() -> None:
    inner = json.dumps(EXAMPLES["hermes"])
    reply = reply_to(f'<tool_call>{{"name": "g", "arguments": {{"text": {inner}}}}}</tool_call>')
    assert [call.name for call in reply.calls] == ["g"]
    assert json.loads(reply.calls[0].arguments) == {"text": EXAMPLES["hermes"]}


def test_classifier_reads_on_behind_a_broken_call() -> None:
    reply = reply_to(f'<tool_call>{{"name": "f", oops}}</tool_call>{EXAMPLES["hermes"]}')
    assert reply.text == '<tool_call>{"name": "f", oops}</tool_call>'
    assert (len(reply.calls), [error.reason for error in reply.errors]) == (1, ["malformed"])


def test_classifier_accepts_no_more_calls_than_an_answer_may_have() -> None:
    reply = reply_to(EXAMPLES["hermes"] * (MAX_CALLS + 2))
    assert len(reply.calls) == MAX_CALLS
    assert reply.text == EXAMPLES["hermes"] * 2
    assert [error.reason for error in reply.errors] == ["too_many_calls"] * 2


def test_classifier_looks_at_no_more_opening_markers_than_allowed() -> None:
    raw = "<tool_call>x " * 300 + EXAMPLES["hermes"]
    reply = reply_to(raw)
    assert (reply.text, reply.calls) == (raw, [])


def test_classifier_accepts_arguments_of_a_hundred_kilobytes() -> None:
    text = 'Zürich "quoted"\n' * 7000
    arguments = json.dumps({"city": text})
    reply = reply_to(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert json.loads(reply.calls[0].arguments) == {"city": text}


def test_classifier_refuses_arguments_over_the_limit_and_keeps_their_text() -> None:
    raw = f'<tool_call>{{"name": "g", "arguments": {{"a": "{"x" * MAX_ARGUMENT_CHARACTERS}"}}}}</tool_call>'
    whole = reply_to(raw)
    assert (whole.text, whole.calls) == (raw, [])
    assert [error.reason for error in whole.errors] == ["arguments_too_large"]
    cut = read(
        Classifier(HERMES, tools=COMPILED), raw, lambda text: [text[i : i + 9973] for i in range(0, len(text), 9973)]
    )
    assert cut == whole


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ('{"city": "a", "city": "b"}', "duplicate_key"),
        ('{"city": "a", "x": {"k": 1, "k": 1}}', "duplicate_key"),
        ('{"city": NaN}', "arguments_not_json"),
        ('{"city": "a",}', "arguments_not_json"),
        ("{'city': 'a'}", "arguments_not_json"),
        ('{"city": "a\nb"}', "arguments_not_json"),
        ('["a"]', "arguments_not_object"),
        ("3", "arguments_not_object"),
        ('{"city": 3}', "arguments_invalid"),
        ('{"n": 3}', "arguments_invalid"),
        ('{"city": "a", "more": 1}', "arguments_invalid"),
        ('{"city": ' + "[" * 70 + "]" * 70 + "}", "malformed"),
    ],
)
def test_classifier_refuses_arguments_with_a_reason(arguments: str, reason: str) -> None:
    raw = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    reply = reply_to(raw)
    assert (reply.text, reply.calls, [error.reason for error in reply.errors]) == (raw, [], [reason])


def test_classifier_refuses_a_key_given_twice_in_tags_and_pairs() -> None:
    for name, raw in (
        ("function_tags", "<function=g><parameter=a>1</parameter><parameter=a>2</parameter></function>"),
        ("argument_pairs", "<tool_call>g" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2 + "</tool_call>"),
        ("gemma4", "<|tool_call>call:g{a:1,a:2}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[g(a=1, a=2)]<|tool_call_end|>"),
    ):
        reply = reply_to(raw, ReplyFormat.named(tools=name))
        assert (reply.text, [error.reason for error in reply.errors]) == (raw, ["duplicate_key"])


def test_classifier_refuses_objects_with_keys_that_do_not_belong() -> None:
    for call in ('{"name": "g", "arguments": {}, "x": 1}', '{"name": "g"}', '{"name": 3, "arguments": {}}', "{}"):
        raw = f"<tool_call>{call}</tool_call>"
        assert (reply_to(raw).text, reply_to(raw).calls) == (raw, [])


def test_classifier_streams_no_more_calls_than_it_may_accept() -> None:
    policy = replace(POLICY, eager=True)
    classifier = Classifier(HERMES, policy, tools=COMPILED)
    outputs = classifier.push(EXAMPLES["hermes"] * (MAX_CALLS + 1)) + classifier.flush()
    indices = {output.index for output in outputs if isinstance(output, ToolCallDelta)}
    assert indices == set(range(MAX_CALLS))
