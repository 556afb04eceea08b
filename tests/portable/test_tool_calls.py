"""What makes a proposal a call: declarations that can be used, values that become JSON, schemas that judge in time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.shared_data import shared
from troth.contracts.tools import ToolSpec
from troth.errors import RequestError
from troth.text.linear_pattern import LinearPattern, PatternError
from troth.text.tool_calls import MAX_TOOLS, ToolSet, _from_text, new_id
from troth.text.tool_formats.coercion import ITEM, json_text, types_at
from troth.text.tool_formats.unit import Proposal
from troth.text.tool_schema import ToolSchema


def fault_of(schema: Any, arguments: Any) -> tuple[str, str] | None:
    return ToolSchema(schema, param="tools").fault(arguments)


def refusal_of(schema: Any, **options: bool) -> str:
    with pytest.raises(RequestError) as caught:
        ToolSchema(schema, param="tools[0].parameters", **options)
    assert (caught.value.param, caught.value.code) == ("tools[0].parameters", "invalid_schema")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "schema", "written"),
    [
        ("3", {"type": "integer"}, "3"),
        (" 3\n", {"type": "integer"}, "3"),
        ("3", {"type": "string"}, '"3"'),
        ("007", {"type": "integer"}, '"007"'),
        ("1.50", {"type": "number"}, "1.50"),
        ("12345678901234567890123", {"type": "number"}, "12345678901234567890123"),
        ("3.0", {"type": "integer"}, "3.0"),
        ("True", {"type": "boolean"}, "true"),
        ("yes", {"type": "boolean"}, '"yes"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("None", {"type": ["integer", "null"]}, "null"),
        ("null", {"type": "string"}, '"null"'),
        ("1abc", {"type": ["string", "integer"]}, '"1abc"'),
        ("7", {"type": ["string", "integer"]}, "7"),
        ("7", {"enum": ["7", "8"]}, '"7"'),
        ("7", {"const": 7}, "7"),
        ('{"a": 1}', {"anyOf": [{"type": "object"}, {"type": "string"}]}, '{"a": 1}'),
        ("{broken", {"anyOf": [{"type": "object"}, {"type": "string"}]}, '"{broken"'),
        ("[1, 2]", {"$ref": "#/$defs/list"}, "[1, 2]"),
        ('{"a": 1, "a": 2}', {"type": "object"}, '"{\\"a\\": 1, \\"a\\": 2}"'),
        ("3", True, "3"),
        ('"quoted"', True, '"\\"quoted\\""'),
        ("plain", True, '"plain"'),
        ("3", {"allOf": [{"type": "string"}]}, '"3"'),
        ("3", {"type": "object"}, "3"),
        ("[" * 100_000, True, '"' + "[" * 100_000 + '"'),
    ],
)
def test_tool_calls_write_a_value_by_its_schema(text: str, schema: Any, written: str) -> None:
    root = {"properties": {"k": schema}, "$defs": {"list": {"type": "array"}}}
    assert json_text(text, types_at(root, ("k",))) == written


def test_tool_calls_find_types_inside_objects_and_arrays() -> None:
    inner = {"type": "object", "properties": {"id": {"type": "integer"}}}
    schema = {"properties": {"rows": {"anyOf": [{"type": "array", "items": inner}, {"type": "null"}]}}}
    assert types_at(schema, ("rows",)) == {"array", "null"}
    assert types_at(schema, ("rows", ITEM, "id")) == {"integer"}
    assert len(types_at(schema, ("other",))) == 7
    assert types_at({"additionalProperties": {"type": "string"}}, ("any",)) == {"string"}
    assert types_at({"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"k": {"type": "null"}}}}}, ("k",)) == {"null"}
    circle = {"properties": {"k": {"$ref": "#/properties/k"}}}
    assert types_at(circle, ("k",))


def test_tool_calls_point_at_what_fails() -> None:
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "items": {"type": "integer"}}}}
    assert fault_of(schema, {"a/b": [1, "x"]}) == ("/a~1b/1", "'x' is not of type 'integer'")
    assert fault_of(schema, {"a/b": [1, 2.0]}) is None


def test_tool_calls_refuse_tools_that_cannot_be_told_apart() -> None:
    for tools, param in (
        ([ToolSpec(name="f"), ToolSpec(name="f")], "tools[1].function.name"),
        ([ToolSpec(name="")], "tools[0].function.name"),
        ([ToolSpec(name=f"t{number}") for number in range(MAX_TOOLS + 1)], "tools"),
    ):
        with pytest.raises(RequestError) as caught:
            ToolSet(tools)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nothing"}, "is not a JSON Schema"),
        ({"$ref": "https://example.org/schema"}, "refers to"),
        ({"$ref": "#/$defs/missing"}, "refers to"),
        ({"$ref": "other.json#/a"}, "refers to"),
        ({"$ref": "#"}, "round in a circle"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "round in a circle"),
        ({"allOf": [{"anyOf": [{"$ref": "#"}]}]}, "round in a circle"),
        ({"$dynamicRef": "#x"}, "only local $ref"),
        ({"enum": list(range(300))}, "an enum of 300"),
        ({"unevaluatedProperties": False, "patternProperties": {"a": True}}, "cannot be checked safely"),
    ],
)
def test_tool_calls_refuse_schemas_that_cannot_be_used(schema: Any, message: str) -> None:
    assert message in refusal_of(schema)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "string"}, " at #/type"),
        ({"type": ["string", "null"]}, " at #/type"),
        ({"const": "x"}, " at #/const"),
        ({"enum": [1, "{}", None]}, " at #/enum"),
        ({"anyOf": [{"type": "array"}, {"const": 1}]}, " at #/anyOf"),
        ({"type": "object", "allOf": [{"type": ["array", "null"]}]}, " at #/allOf"),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "integer"}}}, " at #/$ref"),
        ({"not": {"type": ["object", "null"]}}, " at #/not"),
        (False, ""),
    ],
    ids=json.dumps,
)
def test_tool_calls_refuse_schemas_that_no_arguments_match(schema: Any, pointer: str) -> None:
    """A forced call of such a tool once always came out as text."""
    tools = [ToolSpec(name="g"), ToolSpec(name='f"', parameters=schema)]
    with pytest.raises(RequestError) as caught:
        ToolSet(tools)
    assert (caught.value.param, caught.value.code) == ("tools[1].function.parameters", "invalid_schema")
    assert rf'tools[1].function.parameters of "f\"": the schema{pointer} allows no object' in str(caught.value)


@pytest.mark.parametrize(
    "schema", [True, {}, {"type": ["object", "null"]}, {"enum": [1, {}]}, {"not": {"type": "null"}}]
)
def test_tool_calls_take_schemas_that_some_arguments_match(schema: Any) -> None:
    assert ToolSet([ToolSpec(name="f", parameters=schema)]).notices == {}


def test_tool_calls_point_at_the_part_of_a_schema_that_cannot_be_used() -> None:
    assert refusal_of({"properties": {"a/b": {"items": {"type": "strin"}}}}).startswith(
        "the schema at #/properties/a~1b/items/type is not"
    )
    assert "at #/anyOf/1/$ref refers to" in refusal_of({"anyOf": [{}, {"$ref": "#/none"}]})
    assert "at #/$defs/a has an enum" in refusal_of({"$defs": {"a": {"enum": list(range(257))}}})
    assert "at #/$defs/a has a $ref that leads round" in refusal_of({"$defs": {"a": {"$ref": "#/$defs/a"}}})


def test_tool_calls_refuse_schemas_that_are_too_much() -> None:
    deep: Any = True
    for _ in range(10_000):
        deep = {"items": deep}
    assert "deeper than" in refusal_of(deep)
    assert "more than 4096 parts" in refusal_of({"properties": {f"k{number}": {} for number in range(5000)}})
    large = {"properties": {f"k{number}": True for number in range(4000)}}
    with pytest.raises(RequestError, match="more than 16384 parts together"):
        ToolSet([ToolSpec(name=f"f{number}", parameters=large) for number in range(5)])


def test_tool_calls_keep_no_large_schemas_compiled() -> None:
    large = {"properties": {f"k{number}": {"description": "x" * 80} for number in range(1000)}}
    looked_up = _from_text.cache_info().misses
    ToolSet([ToolSpec(name="f", parameters=large)])
    assert _from_text.cache_info().misses == looked_up
    ToolSet([ToolSpec(name="f", parameters={"title": "kept, and in no other test"})])
    assert _from_text.cache_info().misses == looked_up + 1


def test_tool_calls_read_a_schema_in_time_that_grows_with_its_parts_and_looks_at_each() -> None:
    """Each part is looked at by itself, as the standard's own schema of schemas would: here the last of many."""
    properties: dict[str, Any] = {f"k{number}": {"type": "string", "description": "x"} for number in range(2000)}
    assert ToolSchema({"properties": properties}, param="tools").num_parts == 2001
    for wrong in (
        {"maxLength": -1},
        {"required": ["a", "a"]},
        {"allOf": []},
        {"$anchor": "1"},
        {"dependentRequired": {"a": 1}},
        {"if": 5},
        5,
    ):
        assert "is not a JSON Schema" in refusal_of({"properties": {**properties, "last": {"items": wrong}}}), wrong


def test_tool_calls_report_keywords_that_are_not_checked_or_refuse_them() -> None:
    schema = {"type": "object", "x-order": 1, "strange": True, "properties": {"k": {"odd": 1}}}
    assert ToolSchema(schema, param="tools").notices == ("odd", "strange")
    assert "odd, strange" in refusal_of(schema, strict_keywords=True)
    assert ToolSet([ToolSpec(name="f", parameters=schema)]).notices == {"f": ("odd", "strange")}


@pytest.mark.parametrize("pattern", ["(a)\\1", "(?=a)b", "(", "(a{1000}){1000}", r"^\p{L}$"])
def test_tool_calls_report_patterns_that_are_not_checked_or_refuse_them(pattern: str) -> None:
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: False}, "additionalProperties": False}):
        assert ToolSchema(schema, param="tools").notices == (f"pattern {pattern!r}",)
        assert fault_of(schema, "x") is None
        assert fault_of(schema, {"x": 1}) is None
        assert "cannot be checked" in refusal_of(schema, strict_keywords=True)


def test_tool_calls_follow_references_into_themselves() -> None:
    tree = {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}}}
    schema = {**tree, "$ref": "#/$defs/node"}
    assert fault_of(schema, {"n": 1, "next": {"n": 2, "next": {"n": 3}}}) is None
    assert fault_of(schema, {"next": {"next": {"n": "x"}}}) == ("/next/next/n", "'x' is not of type 'integer'")


def test_tool_calls_end_a_validation_that_would_take_for_ever() -> None:
    branch = {"items": {"$ref": "#/$defs/a"}}
    schema = {
        "$defs": {"a": {"anyOf": [{**branch, "minItems": 2}, {**branch, "minItems": 3}, branch]}},
        "$ref": "#/$defs/a",
    }
    value: Any = 1
    for _ in range(60):
        value = [value, value] if len(json.dumps(value)) < 500 else [value]
    started = time.perf_counter()
    fault = fault_of({"not": schema, "$defs": schema["$defs"]}, value)
    assert fault is not None
    assert time.perf_counter() - started < 60
    many = fault_of({}, [0] * 10_000)
    assert many is not None
    assert "more than 8192" in many[1]
    wide = fault_of({}, {f"k{number}": 0 for number in range(300)})
    assert wide is not None
    assert "more than 256 arguments" in wide[1]


def test_tool_calls_do_not_follow_references_out_of_the_schema() -> None:
    schema = {"properties": {"k": {"$id": "https://example.org/k", "$ref": "#/$defs/x"}}, "$defs": {"x": True}}
    assert fault_of(schema, {"k": 1}) == ("", "the schema refers to something that is not there")
    inner = {"$id": "https://example.org/a", "$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#"}}}
    fault = fault_of({"properties": {"k": inner}, "$defs": {"x": True}}, {"k": 1})
    assert fault == ("", "the schema and the arguments nest too deeply")


def test_tool_calls_check_unique_items_without_comparing_all_pairs() -> None:
    rows = [{"k": number, "z": {}} for number in range(2000)]
    assert fault_of({"uniqueItems": True}, rows) is None
    assert fault_of({"uniqueItems": True}, [*rows, {"z": {}, "k": 7.0}]) is not None
    assert fault_of({"uniqueItems": True}, [1, True, "1", None]) is None


def test_tool_calls_agree_with_the_test_suite_of_the_standard() -> None:
    folder = shared("schemas/json-schema-test-suite/draft2020-12")
    num_checked, wrong = 0, []
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            try:
                schema = ToolSchema(group["schema"], param="tools")
            except RequestError:
                continue
            if schema.notices:
                continue
            for case in group["tests"]:
                num_checked += 1
                if (schema.fault(case["data"]) is None) != case["valid"]:
                    wrong.append(f"{path.stem}: {group['description']}: {case['description']}")
    assert wrong == []
    assert num_checked > 900


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("^a+$", ["a", "aaa"], ["", "ab", "ba"]),
        ("b", ["abc"], ["ac"]),
        ("", ["", "x"], []),
        ("^[a-c]{2,3}$", ["ab", "abc"], ["a", "abca", "ad"]),
        ("^(foo|ba[rz])?$", ["", "foo", "baz"], ["bar foo", "fo"]),
        (r"^\d{3}-\w+$", ["123-a_1"], ["12-a", "١٢٣-a"]),
        (r"^[^\s/]*\/$", ["a/"], ["a b/"]),
        ("^.$", ["é", "🌟"], ["ab"]),
        (r"^[-\w.]+@[\w.]+$", ["a.b-c@d.e"], ["@d", "a b@c"]),
        ("a{0}b{2}", ["abb"], ["ab"]),
        (r"\bcat\b", ["cat", "a cat."], ["cats", "concat"]),
        (r"\Bs$", ["cats"], ["s"]),
        ("^[^a]$", ["b"], ["a"]),
        ("[^a-c]", ["d"], ["abc"]),
    ],
)
def test_linear_pattern_matches_as_the_language_says(pattern: str, yes: list[str], no: list[str]) -> None:
    compiled = LinearPattern.of(pattern)
    assert all(compiled.search(text) for text in yes)
    assert not any(compiled.search(text) for text in no)


def test_linear_pattern_takes_no_longer_for_a_pattern_that_others_die_of() -> None:
    assert not LinearPattern.of("^(a+)+$").search("a" * 5000 + "b")
    assert not LinearPattern.of("^(a|aa|a*)*c$").search("a" * 2000)
    fault = fault_of({"pattern": "^(a?){60}(a){60}$"}, "a" * 30_000)
    assert fault is not None
    assert "too long for the pattern" in fault[1]


@pytest.mark.parametrize(
    "pattern",
    ["(", "a" * 3000, "(a{3000}){2}", "(?P<n>a)(?P=n)", "a{99999}", "a{0,99999}", "(" * 950 + "a" + ")" * 950],
)
def test_linear_pattern_refuses_what_it_cannot_match(pattern: str) -> None:
    with pytest.raises(PatternError):
        LinearPattern(pattern)


def test_tool_calls_ids_are_their_own() -> None:
    assert len({new_id("call") for _ in range(100)} | {new_id("nine") for _ in range(100)}) == 200


def test_tool_calls_describe_a_proposal_of_an_unknown_tool() -> None:
    error = ToolSet([ToolSpec(name="f")]).fault(Proposal("F", None, ["{}"]))
    assert error is not None
    assert (error.reason, error.name, error.message) == ("unknown_tool", "F", "no tool is called 'F'")
