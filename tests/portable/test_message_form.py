"""Messages take the form that one template wants: system text, results, reasoning, ids, arguments."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troth.text.chat_renderer import ChatRenderer
from troth.text.chat_template import ChatTemplate
from troth.text.message_form import MessageForm, shape_declarations, shape_messages, short_call_id
from troth.text.messages import normalise_messages
from troth.text.tool_declarations import declarations_for_template

NOON = datetime(2026, 2, 3, 12, 0, 0)
SYSTEM = {"role": "system", "content": "be brief"}
DEVELOPER = {"role": "developer", "content": "use metric units"}
HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}
LATE = {"role": "system", "content": "now in French"}


def shaped(*messages: dict[str, Any], with_tools: bool = False, **form: Any) -> list[dict[str, Any]]:
    return shape_messages(normalise_messages(list(messages)), MessageForm(**form), with_tools=with_tools)


def call(call_id: str | None = "c1", name: str = "f", arguments: Any = '{"a": 1}') -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made | ({"id": call_id} if call_id else {})


def said(messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in messages]


def test_form_system_and_developer_at_the_start_become_one() -> None:
    assert said(shaped(SYSTEM, DEVELOPER, HELLO)) == [("system", "be brief\n\nuse metric units"), ("user", "hello")]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("anywhere", [("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("system", "now in French")]),
        ("leading", [("system", "be brief\n\nnow in French"), ("user", "hello"), ("assistant", "hi")]),
        ("none", [("user", "be brief\n\nnow in French\nhello"), ("assistant", "hi")]),
    ],
)
def test_form_late_system_text_goes_where_it_is_heard(place: Any, expected: Any) -> None:
    assert said(shaped(SYSTEM, HELLO, ANSWER, LATE, system=place)) == expected


def test_form_system_text_without_a_user_becomes_one() -> None:
    assert said(shaped(SYSTEM, ANSWER, system="none")) == [("user", "be brief"), ("assistant", "hi")]
    assert said(shaped({"role": "system", "content": ""}, HELLO, system="none")) == [("user", "hello")]


def test_form_empty_system_message_is_put_where_tools_need_one() -> None:
    assert said(shaped(HELLO, with_tools=True, system_with_tools=True)) == [("system", ""), ("user", "hello")]
    assert said(shaped(SYSTEM, HELLO, with_tools=True, system_with_tools=True))[0] == ("system", "be brief")
    assert said(shaped(HELLO, system_with_tools=True)) == [("user", "hello")]


def test_form_results_get_the_name_of_their_call() -> None:
    assistant = {"role": "assistant", "tool_calls": [call("c1", "f"), call("c2", "g"), call(None, "h")]}
    results = [{"role": "tool", "content": "2", "tool_call_id": "c2"}, {"role": "tool", "content": "1"}]
    own = {"role": "tool", "content": "3", "name": "mine"}
    messages = shaped(HELLO, assistant, *results, own)
    assert [message.get("name") for message in messages[2:]] == ["g", "f", "mine"]
    assert [message["tool_call_id"] for message in messages[2:]] == ["c2", "c1", "call_3"]
    assert [made["id"] for made in messages[1]["tool_calls"]] == ["c1", "c2", "call_3"]


def test_form_short_ids_are_nine_letters_and_digits_and_stay_paired() -> None:
    assistant = {"role": "assistant", "tool_calls": [call("call_0123456789abcdef"), call("abc123XYZ")]}
    results = [{"role": "tool", "content": "x", "tool_call_id": made["id"]} for made in assistant["tool_calls"]]  # type: ignore[index]
    messages = shaped(HELLO, assistant, *results, short_call_ids=True)
    ids = [made["id"] for made in messages[1]["tool_calls"]]
    assert ids[1] == "abc123XYZ"
    assert all(len(made) == 9 and made.isalnum() for made in ids)
    assert [message["tool_call_id"] for message in messages[2:]] == ids
    assert ids == [short_call_id("call_0123456789abcdef"), short_call_id("abc123XYZ")]


@pytest.mark.parametrize(
    ("form", "given_as", "expected"),
    [
        ("object", '{"a": 1}', {"a": 1}),
        ("object", "no json", "no json"),
        ("text", '{"a":1}', '{"a": 1}'),
        ("text", {"é": None}, '{"é": null}'),
        ("text", "no json", "no json"),
    ],
)
def test_form_arguments_are_an_object_or_its_text(form: Any, given_as: Any, expected: Any) -> None:
    messages = shaped({"role": "assistant", "tool_calls": [call(arguments=given_as)]}, arguments=form)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", "tool_plan"])
def test_form_reasoning_stands_in_the_field_a_template_reads(field: Any) -> None:
    message = shaped({"role": "assistant", "content": "4", "reasoning": "2 + 2"}, reasoning=field)[0]
    assert message == {"role": "assistant", "content": "4", field: "2 + 2"}


def test_form_reasoning_as_a_part_and_as_blocks() -> None:
    message = {"role": "assistant", "content": "4", "reasoning": "2 + 2"}
    parts = [{"type": "thinking", "thinking": "2 + 2"}, {"type": "text", "text": "4"}]
    assert shaped(message, reasoning="part")[0]["content"] == parts
    assert shaped(message, reasoning="part", content="parts")[0]["content"] == parts
    blocks = shaped(message, ANSWER, reasoning="blocks")
    assert blocks[0]["content"]["blocks"] == [{"type": "thoughts", "text": "2 + 2"}, {"type": "response", "text": "4"}]
    assert blocks[1]["content"]["blocks"] == [{"type": "response", "text": "hi"}]


def test_form_content_and_results_as_lists() -> None:
    result = {"role": "tool", "content": "x", "tool_call_id": "c1"}
    assert said(shaped(HELLO, content="parts")) == [("user", [{"type": "text", "text": "hello"}])]
    assert said(shaped(result, results="list", content="parts")) == [("tool", ["x"])]


def test_form_null_content_stands_beside_calls_alone() -> None:
    messages = shaped(HELLO, {"role": "assistant", "tool_calls": [call()]}, {"role": "assistant"}, null_content=True)
    assert [message["content"] for message in messages] == ["hello", None, ""]


MESSAGES = st.lists(
    st.sampled_from(
        [
            SYSTEM,
            DEVELOPER,
            HELLO,
            ANSWER,
            LATE,
            {"role": "assistant", "reasoning": "r", "content": "", "tool_calls": [call()]},
            {"role": "tool", "content": "x"},
        ]
    ),
    min_size=1,
    max_size=6,
)
FORMS = st.builds(
    MessageForm,
    content=st.sampled_from(["text", "parts"]),
    system=st.sampled_from(["none", "leading", "anywhere"]),
    arguments=st.sampled_from(["object", "text"]),
    reasoning=st.sampled_from(["reasoning_content", "thinking", "part", "blocks"]),
    short_call_ids=st.booleans(),
    results=st.sampled_from(["text", "list"]),
    null_content=st.booleans(),
    system_with_tools=st.booleans(),
)


@given(MESSAGES, FORMS, st.booleans())
def test_form_changes_nothing_it_was_given_and_loses_no_text(messages: Any, form: MessageForm, tools: bool) -> None:
    normal = normalise_messages(messages)
    before = copy.deepcopy(normal)
    result = shape_messages(normal, form, with_tools=tools)
    assert normal == before
    written = repr(result)
    assert all(message["content"] in written for message in before)
    assert all(message["role"] != "system" for message in result[1:]) or form.system == "anywhere"


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("form", "names"),
    [("wrapped", ["tools"]), ("flat", ["tools"]), ("definitions", ["tools"]), ("functions", ["datetime", "functions"])],
)
def test_form_declarations_go_under_the_names_a_template_reads(form: Any, names: list[str]) -> None:
    declared = declarations_for_template([TOOL])
    values = shape_declarations(declared, MessageForm(declarations=form), lambda: NOON)
    assert sorted(values) == names
    without = shape_declarations(None, MessageForm(declarations=form), lambda: NOON)
    assert sorted(without) == ([] if names == ["tools"] else names)


def test_form_definitions_are_those_of_command_r() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {}}, "required": ["city"]}
    declared = declarations_for_template([{"name": "f", "parameters": parameters}])
    values = shape_declarations(declared, MessageForm(declarations="definitions"), lambda: NOON)
    assert values["tools"][0]["parameter_definitions"] == {
        "city": {"description": "", "type": "str", "required": True},
        "days": {"description": "", "type": "dict", "required": False},
    }


def test_renderer_takes_the_tool_template_for_tools_alone() -> None:
    def compiled(text: str) -> ChatTemplate:
        return ChatTemplate(text, bos_token=None, eos_token=None)

    renderer = ChatRenderer(compiled("plain"), tool_template=compiled("{{ tools[0].function.name }}"))
    assert renderer.render([HELLO]) == "plain"
    assert renderer.render([HELLO], tools=[]) == "plain"
    assert renderer.render([HELLO], tools=[TOOL]) == "f"


def test_renderer_variables_do_not_replace_the_conversation() -> None:
    source = "{{ messages[0].content }}{{ tools is defined }}{{ add_generation_prompt }}"
    renderer = ChatRenderer(ChatTemplate(source, bos_token=None, eos_token=None))
    assert renderer.render([HELLO], variables={"messages": [], "add_generation_prompt": 1}) == "helloFalseTrue"
