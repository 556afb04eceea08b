"""Past calls written by Troth: what stands in the content reads back as the calls it was made of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.portable.tool_corpus import read
from troth.contracts.tools import CallForm, ToolPolicy, ToolSpec
from troth.text.classifier import Classifier, ReplyFormat
from troth.text.message_form import MessageForm, shape_messages
from troth.text.tool_calls import ToolSet
from troth.text.tool_formats.written import WRITERS, write_calls

FORM = CallForm(opens=("<call>",), closes=("</call>",))
CALLS: list[tuple[str, Any]] = [
    ("f", {"city": "Sào 'Paulo'", "n": 1, "deep": {"list": [True, None, 2.5, "x"]}}),
    ("g", {}),
    ("f", {"city": "a\nb"}),
]
TOOLS = ToolSet([ToolSpec(name="f"), ToolSpec(name="g")])


def calls_in(text: str, name: str, form: CallForm | None = None) -> list[tuple[str, Any]]:
    reply = read(Classifier(ReplyFormat.named(tools=name, call_form=form), ToolPolicy(), tools=TOOLS), text)
    assert (reply.errors, reply.text) == ([], "")
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


@pytest.mark.parametrize("calls", [CALLS[:1], CALLS[1:2], CALLS], ids=["one", "empty", "several"])
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_written_calls_read_back_in_their_format(name: str, calls: list[tuple[str, Any]]) -> None:
    assert calls_in(write_calls(name, calls), name) == calls


def test_written_calls_of_a_declared_form_read_back() -> None:
    assert calls_in(write_calls("declared", CALLS, FORM), "declared", FORM) == CALLS


def test_written_calls_stand_behind_what_was_said() -> None:
    function = {"name": "f", "arguments": {"n": 1}}
    turn = {
        "role": "assistant",
        "content": "Wait.",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "content": "2", "tool_call_id": "1"}
    form = MessageForm(written_calls="hermes", results="user")
    said, told = shape_messages([turn, result], form)
    assert said["content"] == 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    assert "tool_calls" not in said
    assert (told["role"], told["content"]) == ("user", "2")
    assert turn["tool_calls"]


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_written_arguments_that_are_no_object_are_not_lost(name: str) -> None:
    assert "not JSON" in write_calls(name, [("f", "not JSON")])
