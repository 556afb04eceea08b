"""A model that thinks and calls tools, over HTTP with the official client: right to the letter, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import troth
from tests.e2e.demo_server import DEADLINE_S, DemoServer
from tests.e2e.hybrid_chats import MODEL, chats, fields, streamed, whole
from tests.shared_data import shared
from troth.config.options import ModelOptions

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.e2e

NUM_CHATS = 60
NUM_ALONE = 4
SHARE = 0.98
"""Of the chats, as the model's makers measured it in float32."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    arguments = ("--model", str(shared(MODEL)), "--dtype", "float32", "--rows", "16")
    with (
        DemoServer(tmp_path_factory.mktemp("tools"), *arguments) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
    ):
        yield client
        server.wait_until_idle()
        log = server.log.read_text()
    assert "Traceback" not in log, log


def row_of(kind: str, *, thinking: bool) -> dict[str, Any]:
    """The first chat of a kind, in one way of thinking."""
    return next(row for row in chats() if row["kind"] == kind and row["enable_thinking"] == thinking)


def answer(client: Any, row: dict[str, Any], **others: Any) -> Any:
    """The whole reply, as the client has it."""
    return client.chat.completions.create(**fields(row, **others))


def reasoning_of(reply: Any) -> str:
    return getattr(reply.choices[0].message, "reasoning_content", "")


def test_chats_come_out_to_the_letter_sixteen_at_once(client: Any) -> None:
    rows = chats()[:NUM_CHATS]
    with ThreadPoolExecutor(16) as threads:
        told = list(threads.map(lambda row: streamed(client, row), rows))
    wrong = [row["id"] for row, said in zip(rows, told, strict=True) if not said.matches(row)]
    assert len(wrong) <= NUM_CHATS * (1 - SHARE), wrong
    assert any(said.calls and said.reasoning for said in told)
    ids = [call_id for said in told for call_id in said.ids]
    assert len(ids) == len(set(ids))


def test_chat_alone_and_whole_is_the_one_that_was_streamed_among_others(client: Any) -> None:
    rows = [row_of("tool", thinking=True), row_of("tool", thinking=False), *chats()[: NUM_ALONE - 2]]
    for row in rows:
        one = whole(client, row)
        assert one == streamed(client, row)
        assert one.matches(row), one


def test_tool_loop_goes_from_question_to_call_to_answer(client: Any) -> None:
    row = row_of("tool_final", thinking=True)
    question = {**row, "messages": row["messages"][:-2]}
    reply = answer(client, question)
    (call,) = reply.choices[0].message.tool_calls
    (past,) = row["messages"][-2]["tool_calls"]
    assert (call.function.name, json.loads(call.function.arguments)) == (
        past["function"]["name"],
        past["function"]["arguments"],
    )
    assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == ("tool_calls", None)
    said = reply.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": row["messages"][-1]["content"]}
    last = answer(client, {**row, "messages": [*question["messages"], said, result]})
    assert last.choices[0].message.content == row["expected"]["content"]
    assert last.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "off",
    [
        {"enable_thinking": False},
        {"enable_thinking": None, "chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": None, "thinking": {"type": "disabled"}},
        {"enable_thinking": None, "reasoning": {"effort": "none"}},
        {"enable_thinking": None, "reasoning": {"budget": 0}},
    ],
)
def test_thinking_off_says_the_same_without_a_thought(client: Any, off: dict[str, Any]) -> None:
    reply = answer(client, row_of("cap", thinking=True), extra_body=off)
    assert reply.choices[0].message.content == row_of("cap", thinking=True)["expected"]["content"]
    assert reasoning_of(reply) == ""
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_budget_ends_the_thought_after_so_many_tokens(client: Any, stream: bool) -> None:
    row = row_of("tool", thinking=True)
    free, bound = answer(client, row), answer(client, row, extra_body={"reasoning": {"budget": 4}})
    assert free.usage.completion_tokens_details.reasoning_tokens > 4
    assert bound.usage.completion_tokens_details.reasoning_tokens == 4
    assert reasoning_of(free).startswith(reasoning_of(bound))
    assert bound.choices[0].message.content is None
    assert bound.choices[0].message.tool_calls[0].function == free.choices[0].message.tool_calls[0].function
    if stream:
        assert streamed(client, row, extra_body={"reasoning": {"budget": 4}}).reasoning == reasoning_of(bound)


def test_parallel_calls_come_together_and_one_alone_where_they_may_not(client: Any) -> None:
    row = next(row for row in chats() if len(row["expected"].get("tool_calls", [])) > 1)
    several, one = whole(client, row), whole(client, row, parallel_tool_calls=False)
    assert len(several.calls) > 1
    assert one.calls == several.calls[:1]
    assert one.finish_reason == "tool_calls"
    assert one == streamed(client, row, parallel_tool_calls=False)


def test_tool_choice_none_calls_nothing(client: Any) -> None:
    row = row_of("tool", thinking=False)
    said = whole(client, row, tool_choice="none")
    assert (said.calls, said.finish_reason) == ([], "stop")
    assert said.content


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_tool_choice_forces_a_call_that_validates(client: Any, choice: str, thinking: bool) -> None:
    """Of a question that needs none."""
    asked, tools = row_of("cap", thinking=thinking), row_of("tool", thinking=True)["tools"]
    name = tools[-1]["function"]["name"]
    wanted = "required" if choice == "required" else {"type": "function", "function": {"name": name}}
    row = {**asked, "tools": tools}
    said = whole(client, row, tool_choice=wanted)
    assert said.calls
    assert said.finish_reason == "tool_calls"
    assert said.content == ""
    assert {called for called, _ in said.calls} <= ({name} if choice == "named" else names(tools))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in said.calls)
    assert said == streamed(client, row, tool_choice=wanted)


def names(tools: list[dict[str, Any]]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def test_answer_of_a_schema_is_json_whatever_the_model_thinks(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}}}
    for thinking in (False, True):
        row = {**row_of("cap", thinking=thinking), "tools": None}
        said = whole(client, row, response_format=form)
        assert list(json.loads(said.content)) == ["n"]


def test_strict_tools_bind_the_calls_of_an_answer_that_is_free(client: Any) -> None:
    """The schema asks for what the model would not write by itself."""
    row = row_of("tool", thinking=True)
    wanted = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    tools = [
        {"type": "function", "function": {**tool["function"], "parameters": {**wanted, "additionalProperties": False}}}
        for tool in row["tools"]
    ]
    for tool in tools:
        tool["function"]["strict"] = True
    said = whole(client, row, tools=tools)
    assert said.calls
    assert all(json.loads(arguments).keys() == {"n"} for _, arguments in said.calls)
    assert said.reasoning
    assert said == streamed(client, row, tools=tools)


def test_answer_of_a_schema_beside_tools_is_one_or_the_other(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "additionalProperties": False}}}
    calling = row_of("tool", thinking=True)
    said = whole(client, calling, response_format=form)
    assert said.calls == whole(client, calling).calls
    assert said.content == ""
    speaking = {**row_of("tool_final", thinking=False)}
    said = whole(client, speaking, response_format=form)
    assert said.calls or list(json.loads(said.content)) == ["n"]
    assert said == streamed(client, speaking, response_format=form)


def test_call_with_arguments_of_the_wrong_type_stays_visible_and_is_reported(client: Any) -> None:
    """The schema is changed behind the model's back: what it writes is right, but no longer valid."""
    row = next(row for row in chats() if row["expected"].get("tool_calls") and not row["enable_thinking"])
    (call, *_) = row["expected"]["tool_calls"]
    tools = json.loads(json.dumps(row["tools"]))
    for tool in tools:
        tool["function"]["parameters"]["maxProperties"] = 0
        tool["function"]["parameters"]["minProperties"] = 0
    wrong = {**row, "tools": tools}
    if not call["function"]["arguments"]:
        pytest.skip("the chat calls without arguments")
    reply = answer(client, wrong)
    assert reply.choices[0].message.tool_calls is None
    assert "<tool_call>" in reply.choices[0].message.content
    assert reply.troth["tool_errors"][0]["reason"] == "arguments_invalid"
    forwarded = answer(client, wrong, extra_body={"tool_validation": "forward"})
    (handed_on,) = forwarded.choices[0].message.tool_calls
    assert forwarded.troth["tool_errors"][0]["call_id"] == handed_on.id
    assert forwarded.choices[0].finish_reason == "tool_calls"


def test_reasoning_ended_on_demand_among_others_is_followed_by_the_answer() -> None:
    row = row_of("tool", thinking=True)
    options = {"tools": row["tools"], "thinking": True, "temperature": 0, "max_tokens": 400}
    with troth.Engine.open(str(shared(MODEL)), model_options=ModelOptions(dtype="float32")) as engine:
        streams = [engine.stream(row["messages"], **options) for _ in range(4)]
        asked = iter(streams[0])
        next(segment for segment in asked if segment.kind == "reasoning")
        streams[0].end_reasoning()
        for stream in streams:
            for _ in stream:
                pass
    ended, *others = [stream.reply for stream in streams]
    free = others[0]
    assert {other.reasoning for other in others} == {free.reasoning}
    assert free.reasoning.startswith(ended.reasoning)
    assert ended.reasoning != free.reasoning
    assert 0 < ended.usage.num_reasoning_tokens < free.usage.num_reasoning_tokens
    assert [call.name for call in ended.tool_calls] == [call.name for call in free.tool_calls]
    assert ended.finish_reason == "tool_calls"
