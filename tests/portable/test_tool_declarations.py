"""The copy of tool schemas that templates see can always be written out; the client's own stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troth.errors import RequestError
from troth.text.tool_declarations import MAX_SCHEMA_DEPTH, declarations_for_template, with_every_field


def parameters(schema: Any) -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return declarations_for_template([tool])[0]["function"]["parameters"]


def field(schema: Any) -> Any:
    return parameters({"type": "object", "properties": {"x": schema}})["properties"]["x"]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": ["string", "null"]}, {"type": "string", "nullable": True}),
        ({"type": ["null", "integer", "string"]}, {"type": "integer", "nullable": True}),
        ({"type": ["integer", "string"]}, {"type": "integer"}),
        ({"type": ["null"]}, {"type": "null"}),
        ({"type": []}, {}),
        ({"type": 3}, {}),
        (
            {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "title": "X"},
            {"type": "integer", "minimum": 1, "title": "X", "nullable": True},
        ),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, {"type": "string", "nullable": True}),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (True, {}),
        (False, {}),
        (None, {}),
        ("string", {}),
        ({"type": "array", "items": True}, {"type": "array", "items": {}}),
        ({"type": "object", "additionalProperties": False}, {"type": "object"}),
        (
            {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
            {"type": "object", "additionalProperties": {"type": "string", "nullable": True}},
        ),
        ({"type": "string", "enum": ["a", None], "x-order": 1}, {"type": "string", "enum": ["a", None], "x-order": 1}),
    ],
)
def test_declarations_schema_is_one_that_templates_can_walk(schema: Any, expected: Any) -> None:
    assert field(schema) == expected


@pytest.mark.parametrize("schema", [None, True, False, [], "x", {}, {"type": ["object", "null"]}, {"properties": 3}])
def test_declarations_parameters_are_always_an_object_with_properties(schema: Any) -> None:
    made = parameters(schema)
    assert made["type"] == "object"
    assert isinstance(made["properties"], dict)


def test_declarations_keep_what_they_do_not_mend() -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}, "required": []}}
    made = declarations_for_template([{"type": "function", "function": function, "x-cache": 1}])
    assert made == [{"type": "function", "function": {**function, "description": ""}, "x-cache": 1}]


def test_declarations_bare_function_is_wrapped() -> None:
    made = declarations_for_template([{"name": "f", "description": "d", "parameters": {"type": "object"}}])
    assert made[0]["type"] == "function"
    assert made[0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (["f"], "tools[0]"),
        ([{}], "tools[0].function"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"name": "f"}, {"type": "function", "function": {"name": 3}}], "tools[1].function"),
    ],
)
def test_declarations_that_are_none_are_named(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        declarations_for_template(tools)
    assert caught.value.param == param


def test_declarations_nested_too_deeply_are_refused() -> None:
    schema: Any = {"type": "string"}
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="nests more than 64"):
        parameters({"type": "object", "properties": {"x": schema}})


def test_declarations_with_every_field_have_type_and_description_all_the_way_down() -> None:
    schema = {"properties": {"a": {}, "b": {"type": "array"}, "c": {"properties": {"d": {"type": "integer"}}}}}
    made = with_every_field(declarations_for_template([{"name": "f", "parameters": schema}]))
    fields = made[0]["function"]["parameters"]["properties"]
    assert fields["a"] == {"description": "", "type": "string"}
    assert fields["b"]["items"] == {"description": "", "type": "string"}
    assert fields["c"]["properties"]["d"] == {"description": "", "type": "integer"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "properties", "items", "anyOf", "x", "$defs"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON)
def test_declarations_never_change_what_a_client_sent_and_never_fail(schema: Any) -> None:
    before = copy.deepcopy(schema)
    made = parameters(schema)
    assert schema == before
    assert made["type"] == "object"
    with_every_field([{"function": {"parameters": made}}])
