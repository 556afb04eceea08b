"""Messages as clients send them become plain dicts; what cannot be read is named."""

from __future__ import annotations

from typing import Any

import pytest

from troth.errors import RequestError
from troth.text.messages import normalise_messages


def one(**message: Any) -> dict[str, Any]:
    return normalise_messages([message])[0]


@pytest.mark.parametrize(
    ("role", "normal"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_messages_roles_are_those_of_templates(role: str, normal: str) -> None:
    assert one(role=role, content="x") == {"role": normal, "content": "x"}


def test_messages_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert one(role="user", content=parts)["content"] == "a\nb"
    assert one(role="user", content=[])["content"] == ""


def test_messages_null_content_of_an_assistant_is_empty() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    assert one(role="assistant", content=None, tool_calls=calls)["content"] == ""
    assert one(role="assistant")["content"] == ""


def test_messages_keep_known_fields_and_drop_the_rest() -> None:
    assert one(role="tool", content="x", name="f", tool_call_id="1", audio=None, weight=1) == {
        "role": "tool",
        "content": "x",
        "name": "f",
        "tool_call_id": "1",
    }
    assert one(role="user", content="x", name=None, tool_calls=None, reasoning=None) == {"role": "user", "content": "x"}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_messages_reasoning_has_one_name(field: str) -> None:
    message = one(role="assistant", content="x", **{field: "because"})
    assert message == {"role": "assistant", "content": "x", "reasoning_content": "because"}


def test_messages_reasoning_may_be_parts_of_an_answer() -> None:
    parts = [
        {"type": "thinking", "thinking": "a"},
        {"type": "text", "text": "x"},
        {"type": "thinking", "thinking": "b"},
    ]
    assert one(role="assistant", content=parts) == {"role": "assistant", "content": "x", "reasoning_content": "a\nb"}
    assert one(role="assistant", content=parts, reasoning="c")["reasoning_content"] == "c"
    assert one(role="assistant", content=parts[:1]) == {"role": "assistant", "content": "", "reasoning_content": "a"}
    with pytest.raises(RequestError) as caught:
        one(role="user", content=parts)
    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("arguments", "normal"),
    [
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", "[1]"),
        ('{"a": ', '{"a": '),
        ("[" * 100_000, "[" * 100_000),
    ],
    ids=["json", "object", "empty", "null", "array", "cut", "deep"],
)
def test_messages_tool_arguments_become_an_object_where_they_are_one(arguments: Any, normal: Any) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    message = one(role="assistant", content="", tool_calls=calls)
    function = {"name": "f", "arguments": normal}
    assert message["tool_calls"] == [{"type": "function", "function": function, "id": "c1"}]


def test_messages_are_copies() -> None:
    arguments = {"a": 1}
    given = [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    normal = normalise_messages(given)
    normal[0]["content"] = "y"
    normal[0]["tool_calls"][0]["function"]["arguments"]["a"] = 2
    assert (given[0]["content"], arguments) == ("x", {"a": 1})


CALL = {"function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "tool", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": b"x"}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
        ([{"role": "tool", "content": "x", "tool_call_id": []}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "content": "x", "reasoning": {}}], "messages[0].reasoning"),
        ([{"role": "assistant", "content": [{"type": "thinking"}]}], "messages[0].content[0].thinking"),
        ([{"role": "assistant", "tool_calls": CALL}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [CALL, {"function": {"name": "f", "arguments": 3}}]}],
            "messages[0].tool_calls[1].function.arguments",
        ),
        ([{"role": "assistant", "tool_calls": [CALL | {"id": 3}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "user", "content": "x"}, {"role": "robot"}], "messages[1].role"),
    ],
)
def test_messages_that_cannot_be_read_are_named(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise_messages(messages)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)
