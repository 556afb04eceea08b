"""Tools and reasoning of chat completions: what is asked of the engine, and how calls, thoughts and faults are told."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.portable.serving import CHAT, asking, error_of, hello, records
from troth.contracts.answer import AnswerReading
from troth.contracts.capabilities import (
    EffortCapability,
    ReasoningCapability,
    TemplateCapabilities,
    ThinkingCapability,
)
from troth.contracts.request import Request
from troth.contracts.tools import ToolCall, ToolError
from troth.testing.fake_answer import FakeAnswer
from troth.testing.fake_engine import FakeEngine
from troth.testing.fake_server import FakeServer, byte_model
from troth.text.call_pattern import CallPattern

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "f"}}
THINK = ReasoningCapability(markers="think", open="<think>", close="</think>", kept="all")
SWITCH = ThinkingCapability(on={"enable_thinking": True}, off={"enable_thinking": False}, kind="span", default="on")
ABLE = TemplateCapabilities(chat=True, tool_declarations=True, tool_format="hermes", reasoning=THINK, thinking=SWITCH)
PATTERN = CallPattern('<tool_call>\n{"name": "', '", "arguments": ', "", "}\n</tool_call>", entries=("<tool_call>",))
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
CALLS = tuple(ToolCall(index=i, id=f"call_{i}", name="f", arguments=f'{{"a": {i}}}') for i in range(2))


def model(answer: FakeAnswer | str = "Hi.", able: TemplateCapabilities = ABLE) -> tuple[FakeEngine, Any]:
    engine = FakeEngine(answer)
    served = byte_model(engine, capabilities=able, calls=PATTERN if able.tools else None)
    return engine, served


def asked(able: TemplateCapabilities = ABLE, **fields: Any) -> Request:
    """The engine request that a body becomes."""
    engine, served = model(able=able)
    with asking([served]) as client:
        response = client.post(CHAT, json=hello(**fields))
    assert response.status_code == 200, response.text
    return engine.requests[0]


def reading(**fields: Any) -> AnswerReading:
    found = asked(**fields).reading
    assert found is not None
    return found


def refused(able: TemplateCapabilities = ABLE, **fields: Any) -> tuple[str, str]:
    with asking([model(able=able)[1]]) as client:
        response = client.post(CHAT, json=hello(**fields))
    assert response.status_code == 400, response.text
    return error_of(response)["param"], error_of(response)["code"]


def reply(answer: FakeAnswer, **fields: Any) -> Any:
    with asking([model(answer)[1]]) as client:
        response = client.post(CHAT, json=hello(**fields))
    return records(response.text) if fields.get("stream") else response.json()


def test_chat_of_a_model_without_marks_reads_nothing() -> None:
    assert asked(TemplateCapabilities(chat=True)).reading is None


def test_tools_reach_the_template_and_the_engine() -> None:
    request = asked(tools=TOOLS, tool_choice="auto", parallel_tool_calls=False)
    assert bytes(request.prompt_ids).decode().startswith("tools=f\n")
    assert request.reading is not None
    assert (request.reading.tools, request.reading.reasoning) == ("hermes", "think")
    (tool,) = request.reading.policy.tools
    assert (tool.name, tool.parameters) == ("f", SCHEMA)
    assert not request.reading.policy.parallel
    assert request.reading.prompt_tail == bytes(request.prompt_ids).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_checks_of_a_tool_s_schema_is_told(stream: bool) -> None:
    """The document said so, and only the log of nobody had it."""
    schema = {"properties": {"a": {"type": "string", "pattern": "(?=x)", "nullable": True}}}
    fields = {"tools": [*TOOLS, {"function": {"name": "g", "parameters": schema}}], "stream": stream}
    told = reply(FakeAnswer(text="Hi."), **fields)
    unchecked = [f"tools[1].function.parameters: {one}" for one in ("nullable", "pattern '(?=x)'")]
    assert (told[-1] if stream else told)["troth"]["not_enforced"] == unchecked
    told = reply(FakeAnswer(text="Hi."), **fields, tool_choice="none")
    assert "not_enforced" not in (told[-1] if stream else told)["troth"]


def test_tool_choice_none_keeps_tools_from_the_template_and_their_marks_in_the_text() -> None:
    request = asked(tools=TOOLS, tool_choice="none")
    assert bytes(request.prompt_ids).decode().startswith("user: hi")
    assert request.reading is not None
    assert request.reading.tools is None


@pytest.mark.parametrize(("stream", "validation", "eager"), [(True, "forward", True), (True, "strict", False)])
def test_arguments_stream_early_only_where_calls_are_forwarded(stream: bool, validation: str, eager: bool) -> None:
    policy = reading(tools=TOOLS, stream=stream, tool_validation=validation).policy
    assert (policy.validation, policy.eager) == (validation, eager)


@pytest.mark.parametrize(("choice", "more"), [("required", True), (NAMED, False)])
def test_forced_choice_is_a_grammar_of_calls(choice: Any, more: bool) -> None:
    grammar = asked(tools=TOOLS, tool_choice=choice).grammar
    assert grammar is not None
    assert grammar.kind == "calls"
    assert '"f\\", \\"arguments\\": " %json' in grammar.source
    assert "thought" in grammar.source


def test_strict_tools_bind_calls_in_an_answer_that_may_be_text() -> None:
    assert asked(tools=TOOLS).grammar is None
    grammar = asked(tools=STRICT).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.frame) == ("calls", "")
    assert "TEXT" in grammar.source
    assert asked(tools=STRICT, tool_choice="none").grammar is None


def test_response_format_beside_tools_is_that_format_or_calls() -> None:
    grammar = asked(tools=TOOLS, response_format={"type": "json_object"}).grammar
    assert grammar is not None
    assert grammar.kind == "json_object"
    assert "@answer" in grammar.frame
    assert "call0" in grammar.frame


def test_response_format_gives_way_to_a_call_that_must_be_made() -> None:
    grammar = asked(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.frame) == ("calls", "")


def test_response_format_comes_after_reasoning_that_the_model_may_begin() -> None:
    wanted = {"type": "json_object"}
    grammar, without = (asked(response_format=wanted, **more).grammar for more in ({}, {"enable_thinking": False}))
    assert grammar is not None
    assert grammar.frame.startswith('start: ("<think>" thought')
    assert without is not None
    assert without.frame == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"tools": STRICT}, "tools"), ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format")],
)
def test_grammars_of_calls_are_refused_where_the_format_allows_none(fields: dict[str, Any], param: str) -> None:
    served = byte_model(FakeEngine("Hi."), capabilities=ABLE, calls=None)
    with asking([served]) as client:
        response = client.post(CHAT, json=hello(**fields))
    assert response.status_code == 400
    assert (error_of(response)["param"], error_of(response)["code"]) == (param, "capability_unavailable")


def test_forced_choice_without_thinking_leaves_no_room_for_a_thought() -> None:
    grammar = asked(tools=TOOLS, tool_choice="required", enable_thinking=False).grammar
    assert grammar is not None
    assert "thought" not in grammar.source


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": TOOLS * 2}, "tools[1].function.name", "invalid_value"),
        ({"tools": ["f"]}, "tools[0]", "invalid_type"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "object", "maxProperties": 2**70}}}]},
            "tools[0].function.parameters",
            "invalid_value",
        ),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "g"}}}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "tool_validation": "lax"}, "tool_validation", "invalid_value"),
        (
            {"tools": [{"function": {"name": "f", "strict": True, "parameters": {"not": {"required": ["a"]}}}}]},
            "tools[0].function.parameters",
            "unsupported_schema",
        ),
        *(
            ({"tools": [*TOOLS, {"function": {"name": "g", "parameters": schema}}], "tool_choice": choice}, place, code)
            for place, code in [("tools[1].function.parameters", "invalid_schema")]
            for schema, choice in [
                ({"type": "string"}, "auto"),
                ({"type": "string"}, "required"),
                ({"properties": {"a": {"pattern": "(?!x)", "type": "string"}}}, "required"),
                ({"properties": {"a": {"pattern": "(?!x)", "type": "string"}}}, {"function": {"name": "g"}}),
                ({"properties": {"a": False}, "required": ["a"]}, "required"),
            ]
        ),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort", "invalid_value"),
        ({"reasoning": {"budget": 1}, "thinking": {"budget_tokens": 2}}, "thinking.budget_tokens", "invalid_value"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type", "invalid_value"),
    ],
)
def test_chat_refuses_wrong_terms_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    assert refused(**fields) == (param, code)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"reasoning": {"budget": 1}}, "reasoning.budget"),
        ({"thinking": {"budget_tokens": 1024}, "reasoning_effort": "low"}, "thinking.budget_tokens"),
    ],
)
def test_chat_refuses_what_the_template_was_not_proved_to_do(fields: dict[str, Any], param: str) -> None:
    assert refused(TemplateCapabilities(chat=True), **fields) == (param, "capability_unavailable")


WRONG_SCHEMAS: list[Any] = [{"type": None}, {"properties": None}, {"properties": {"a": None}}, {"required": [None]}]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [None]}, "messages[0] must be an object, not null"),
        ({"messages": [[]]}, "messages[0] must be an object, not an array"),
        ({"messages": [{"role": None}]}, "messages[0].role is null; it must be one of"),
        ({"messages": [{"role": "user", "content": True}]}, "must be a string or a list of parts, not true"),
        ({"messages": [{"role": "user", "content": [{"type": None}]}]}, "content[0] is of type null; only text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text must be a string, not null"),
        ({"tools": [None]}, "tools[0] must be an object, not null"),
        ({"tools": [{"type": "function", "function": {"name": None}}]}, "function.name must be a string, not null"),
        ({"tools": TOOLS, "tool_choice": [None]}, "not an array"),
        ({"response_format": {"type": True}}, "not true"),
        *(
            ({"tools": [{"function": {"name": "f", "parameters": schema}}]}, "is not a JSON Schema: null is not")
            for schema in WRONG_SCHEMAS
        ),
    ],
)
def test_errors_name_values_as_json_writes_them(fields: dict[str, Any], said: str) -> None:
    """They said None, NoneType, True and dict, which no client has sent."""
    with asking([model()[1]]) as client:
        response = client.post(CHAT, json={**hello(), **fields})
    assert response.status_code == 400
    assert said in error_of(response)["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning": {"budget": 0}},
        {"thinking": {"type": "disabled", "budget_tokens": 9}},
        {"thinking": {"type": "adaptive"}},
    ],
)
def test_chat_of_a_model_that_never_reasons_takes_a_wish_for_no_reasoning(fields: dict[str, Any]) -> None:
    assert asked(TemplateCapabilities(chat=True), **fields).reading is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"reasoning_effort": "high"}, "reasoning_effort"), ({"reasoning": {"effort": "low"}}, "reasoning.effort")],
)
def test_effort_that_the_template_does_not_take_is_told(stream: bool, fields: dict[str, Any], param: str) -> None:
    """Clients send it to every model; it was dropped without a word."""

    def told(found: TemplateCapabilities) -> Any:
        _, served = model(FakeAnswer(text="Hi."), found)
        with asking([served]) as client:
            response = client.post(CHAT, json=hello(**fields, stream=stream))
        return (records(response.text)[-1] if stream else response.json())["troth"]

    of_none = [f"{param}: this model's template takes none"]
    assert told(TemplateCapabilities(chat=True))["not_enforced"] == of_none
    assert told(TemplateCapabilities(chat=True, reasoning=THINK))["not_enforced"] == of_none
    levels = EffortCapability(variable="effort", levels=("low", "high"))
    assert "not_enforced" not in told(TemplateCapabilities(chat=True, effort=levels))
    assert "not_enforced" not in told(ABLE)


@pytest.mark.parametrize(
    ("fields", "variable"),
    [
        ({}, None),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"budget": 0}}, False),
        ({"thinking": {"budget_tokens": 9}}, None),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_every_way_to_ask_for_thinking_sets_the_template_s_switch(fields: dict[str, Any], variable: Any) -> None:
    prompt = bytes(asked(**fields).prompt_ids).decode()
    head = prompt.partition("user: ")[0]
    assert head == ("" if variable is None else f"enable_thinking={variable}\n")


def test_reasoning_of_a_running_request_ends_on_demand_and_the_answer_follows() -> None:
    engine = FakeEngine(FakeAnswer(reasoning="hm " * 2000, text="done"), step_s=0.001)
    served = byte_model(engine, capabilities=ABLE)
    names = []
    with FakeServer([served]) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        for given in ("", "mine", "a/b"):
            headers = {"x-request-id": given} if given else {}
            with client.stream("POST", CHAT, json=hello(stream=True), headers=headers) as answer:
                lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
                first = json.loads(next(lines)[6:])
                name = given or first["id"]
                names.append(name)
                ended = client.post(f"/v1/requests/{name}/end-reasoning")
                assert (ended.status_code, ended.json()) == (200, {"id": name, "object": "request", "answers": 1})
                deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
            said = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content")}
            assert said["content"] == "done"
            assert len(said["reasoning_content"]) < 3000
        for name in names:
            gone = client.post(f"/v1/requests/{name}/end-reasoning")
            assert (gone.status_code, error_of(gone)["code"]) == (404, "request_not_found")


def test_reasoning_of_a_model_that_marks_none_cannot_be_ended() -> None:
    server = FakeServer(FakeEngine("a" * 4000, step_s=0.001))
    asked = {"json": hello(stream=True), "headers": {"x-request-id": "mine"}}
    with (
        server,
        httpx.Client(base_url=server.url, timeout=20) as client,
        client.stream("POST", CHAT, **asked) as answer,
    ):
        lines = answer.iter_lines()  # dropped, it would end the stream
        next(lines)
        refused = client.post("/v1/requests/mine/end-reasoning")
    assert (refused.status_code, error_of(refused)["code"]) == (400, "capability_unavailable")


def test_budget_comes_with_the_tokens_that_close_reasoning() -> None:
    found = reading(reasoning={"budget": 7})
    assert (found.reasoning_budget, found.close_ids) == (7, tuple(b"</think>"))


def test_thinking_off_without_a_switch_is_a_budget_of_nothing() -> None:
    able = TemplateCapabilities(chat=True, reasoning=THINK)
    found = asked(able, enable_thinking=False).reading
    assert found is not None
    assert (found.reasoning_budget, found.close_ids) == (0, tuple(b"</think>"))


def test_final_assistant_message_is_continued_as_text() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    assert reading(messages=messages).continues == "text"


def test_calls_are_told_whole() -> None:
    choice = reply(FakeAnswer(text="", reasoning="hm", calls=CALLS), tools=TOOLS)["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": "f", "arguments": call.arguments}}
            for call in CALLS
        ],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_calls_stream_their_name_once_and_then_arguments() -> None:
    stream = reply(FakeAnswer(text="Wait.", calls=CALLS), tools=TOOLS, stream=True)
    deltas = [call for one in stream for c in one["choices"] for call in c["delta"].get("tool_calls", [])]
    assert [(delta["index"], delta.get("id"), delta["function"].get("name")) for delta in deltas] == [
        (0, "call_0", "f"),
        (0, None, None),
        (1, "call_1", "f"),
        (1, None, None),
    ]
    for call in CALLS:
        assert call.arguments == "".join(d["function"]["arguments"] for d in deltas if d["index"] == call.index)
    assert stream[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_faults_are_told_in_the_extension(stream: bool) -> None:
    wrong = ToolError(reason="arguments_invalid", message="no", name="f", call_id="call_0", pointer="/a")
    forwarded = ToolCall(index=0, id="call_0", name="f", arguments="{}", error=wrong)
    answer = FakeAnswer(text="x", calls=(forwarded,), errors=(ToolError(reason="malformed", message="bad"),))
    told = reply(answer, tools=TOOLS, stream=stream)
    errors = (told[-1] if stream else told)["troth"]["tool_errors"]
    assert errors == [
        {
            "choice": 0,
            "reason": "arguments_invalid",
            "message": "no",
            "name": "f",
            "call_id": "call_0",
            "pointer": "/a",
        },
        {"choice": 0, "reason": "malformed", "message": "bad", "name": None, "call_id": None, "pointer": ""},
    ]


def test_tool_messages_of_the_past_reach_the_template() -> None:
    past = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": NAMED["function"]}],
    }
    messages = [{"role": "user", "content": "hi"}, past, {"role": "tool", "tool_call_id": "1", "content": "fine"}]
    prompt = bytes(asked(messages=messages, tools=TOOLS).prompt_ids).decode()
    assert "tool: fine" in prompt


def test_arguments_of_calls_are_json_text() -> None:
    message = reply(FakeAnswer(text="", calls=CALLS[:1]), tools=TOOLS)["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 0}
