"""What an answer must match, over HTTP and from Python: fields, refusals before generating, and what is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.markdown import Document, code
from tests.portable.serving import CHAT, COMPLETIONS, Asked, asking, error_of, hello, records
from tests.portable.test_library import engine
from troth.contracts.grammar import MAX_CHOICE_BYTES, MAX_GRAMMAR_CHOICES, MAX_SOURCE_BYTES, Grammar
from troth.errors import RequestError
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.testing.fake_engine import FakeEngine
from troth.testing.fake_server import byte_model
from troth.text.grammar import COMPILE_TIMEOUT_S, GrammarCompiler
from troth.text.grammar_schema import (
    _ENFORCED,
    _FORMATS,
    MAX_DEPTH,
    MAX_DIVISOR,
    MAX_NODES,
    MAX_OPTIONAL,
    MAX_PROPERTIES,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def format_of(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


WANTED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar(kind="json_object")),
    ({"response_format": format_of(SCHEMA)}, Grammar(kind="json_schema", source=TEXT)),
    ({"response_format": format_of(SCHEMA, strict=None)}, Grammar(kind="json_schema", source=TEXT)),
    ({"response_format": format_of(SCHEMA, strict=True)}, Grammar(kind="json_schema", source=TEXT, strict=True)),
    ({"response_format": format_of(True)}, Grammar(kind="json_schema", source="true")),
    ({"guided_json": SCHEMA}, Grammar(kind="json_schema", source=TEXT)),
    ({"guided_json": TEXT}, Grammar(kind="json_schema", source=TEXT)),
    ({"guided_regex": "a+"}, Grammar(kind="regex", source="a+")),
    ({"guided_choice": ["a", "b"]}, Grammar(kind="choice", choices=("a", "b"))),
    ({"guided_grammar": 'start: "a"\n'}, Grammar(kind="lark", source='start: "a"\n')),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar(kind="json_schema", source=TEXT)),
    ({"structured_outputs": {"regex": "a+"}}, Grammar(kind="regex", source="a+")),
    ({"structured_outputs": {"choice": ["a"]}}, Grammar(kind="choice", choices=("a",))),
    ({"structured_outputs": {"grammar": 'start: "a"\n'}}, Grammar(kind="lark", source='start: "a"\n')),
    ({"structured_outputs": {"json_object": True}}, Grammar(kind="json_object")),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, Grammar(kind="regex", source="a")),
]


@pytest.mark.parametrize(("fields", "grammar"), WANTED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_become_the_grammar_of_every_choice(path: str, fields: dict[str, Any], grammar: Grammar | None) -> None:
    fake = FakeEngine()
    body = hello(n=2, **fields) if path == CHAT else {"prompt": "hi", "n": 2, **fields}
    with asking(fake) as client:
        assert client.post(path, json=body).status_code == 200
    assert [request.grammar for request in fake.requests] == [grammar, grammar]


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("response_format", "invalid_type", {"response_format": "json"}),
    ("response_format.type", "missing_required_parameter", {"response_format": {}}),
    ("response_format.type", "invalid_value", {"response_format": {"type": "yaml"}}),
    ("response_format.json_schema", "missing_required_parameter", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema", "invalid_type", {"response_format": {"type": "json_schema", "json_schema": []}}),
    ("response_format.json_schema.schema", "missing_required_parameter", {"response_format": format_of(None)}),
    ("response_format.json_schema.schema", "invalid_type", {"response_format": format_of([])}),
    ("response_format.json_schema.strict", "invalid_type", {"response_format": format_of({}, strict="yes")}),
    ("response_format.json_schema.schema", "invalid_schema", {"response_format": format_of({"type": "text"})}),
    ("response_format.json_schema.schema", "invalid_schema", {"response_format": format_of({"$ref": "#"})}),
    (
        "response_format.json_schema.schema",
        "unsupported_schema",
        {"response_format": format_of({"not": {}}, strict=True)},
    ),
    ("guided_json", "invalid_schema", {"guided_json": "{"}),
    ("guided_json", "invalid_grammar", {"guided_json": ""}),
    ("guided_regex", "invalid_grammar", {"guided_regex": "(a"}),
    ("guided_regex", "invalid_grammar", {"guided_regex": "a" * (MAX_SOURCE_BYTES["regex"] + 1)}),
    ("guided_choice", "invalid_type", {"guided_choice": ["a", 5]}),
    ("guided_choice", "invalid_grammar", {"guided_choice": []}),
    ("guided_grammar", "invalid_grammar", {"guided_grammar": "start: foo"}),
    ("structured_outputs.regex", "invalid_type", {"structured_outputs": {"regex": 5}}),
    ("structured_outputs.choice", "invalid_grammar", {"structured_outputs": {"choice": [""]}}),
    ("structured_outputs.structural_tag", "unsupported_parameter", {"structured_outputs": {"structural_tag": "x"}}),
    ("guided_regex", "invalid_value", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
    ("structured_outputs.json_object", "invalid_value", {"structured_outputs": {"regex": "a", "json_object": True}}),
]


@pytest.fixture(scope="module", name="client")
def _client() -> Iterator[Asked]:
    with asking() as client:
        yield client


@pytest.mark.parametrize(("param", "error_code", "fields"), REFUSED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_grammar_that_cannot_be_followed_is_refused_by_name(
    client: Asked, param: str, error_code: str, fields: dict[str, Any], stream: bool
) -> None:
    """Nothing is ever generated without its constraint instead."""
    response = client.post(CHAT, json=hello(stream=stream, **fields))
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, error_code)
    assert param.rpartition(".")[2] in error["message"]
    assert "None" not in error["message"]


def test_model_without_a_compiler_refuses_grammars() -> None:
    with asking([replace(byte_model(FakeEngine()), grammars=None)]) as client:
        response = client.post(CHAT, json=hello(guided_regex="a"))
    assert (response.status_code, error_of(response)["code"]) == (400, "capability_unavailable")


@pytest.mark.parametrize("stream", [False, True])
def test_keywords_that_are_not_enforced_are_told(client: Asked, stream: bool) -> None:
    fields = {"response_format": format_of({"type": "object", "properties": {"a": {"not": {}}}}), "stream": stream}
    response = client.post(CHAT, json=hello(**fields))
    told = records(response.text)[-1] if stream else response.json()
    assert told["troth"]["not_enforced"] == ["#/properties/a/not"]


def test_document_gives_the_limits_of_grammars_as_the_code_has_them() -> None:
    section = Document.read("docs/http.md").section("Structured output")
    kib = {kind: f"{size >> 10} KiB" for kind, size in MAX_SOURCE_BYTES.items()}
    expected = {
        "schema": f"{kib['json_schema']}, {MAX_NODES} parts, {MAX_DEPTH} deep, {MAX_PROPERTIES} properties, "
        f"{MAX_OPTIONAL} of one object that may be left out",
        "`multipleOf`, all of a schema, their least common multiple without decimal places": str(MAX_DIVISOR),
        "regular expression": kib["regex"],
        "Lark grammar": kib["lark"],
        "choices": f"{MAX_GRAMMAR_CHOICES} of {MAX_CHOICE_BYTES >> 10} KiB together",
        "time to compile": f"{COMPILE_TIMEOUT_S:g} s",
    }
    assert {row["what"]: row["limit"] for row in section.table("what", "limit")} == expected
    text = section.flat
    enforced = text[text.index("Enforced are") : text.index("Other keywords")]
    assert {code(word) for word in enforced.replace("(to places inside the schema)", "").split() if "`" in word} == {
        f"{keyword}" for keyword in _ENFORCED
    }
    formats = text[text.index("formats other than") : text.index("and a `oneOf`")]
    assert {code(word) for word in formats.split() if "`" in word} == set(_FORMATS)
    (shown,) = section.fences("json")
    with asking() as client:
        assert client.post(CHAT, json=hello(response_format=json.loads(shown.text))).status_code == 200


def constrained(**options: Any) -> Grammar | None:
    """The grammar of a request made from Python."""
    compiler = GrammarCompiler(ByteTokenizer(), ByteTokenizer.vocab_size)
    one, thread = engine(grammars=lambda vocab_size: compiler)
    one.chat("Hi", **options)
    return thread.requests[0].grammar


def test_library_takes_a_response_format_or_a_grammar() -> None:
    grammar = Grammar(kind="regex", source="a+", begins_after="</think>")
    assert constrained() is None
    assert constrained(response_format={"type": "text"}) is None
    assert constrained(response_format=format_of(SCHEMA)) == Grammar(kind="json_schema", source=TEXT)
    assert constrained(grammar=grammar) == grammar


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("response_format", {"response_format": "json"}),
        ("response_format.type", {"response_format": {"type": "yaml"}}),
        ("response_format", {"response_format": format_of({"$ref": "#"})}),
        ("grammar", {"grammar": "a+"}),
        ("grammar", {"grammar": Grammar(kind="regex", source="(a")}),
        ("grammar", {"grammar": Grammar(kind="json_object"), "response_format": {"type": "text"}}),
    ],
)
def test_library_refuses_a_grammar_before_the_stream_begins(param: str, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        constrained(**options)
    assert caught.value.param == param
