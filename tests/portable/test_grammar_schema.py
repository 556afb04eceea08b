"""Schemas of answers: bounded in time and memory, refused by pointer, and what cannot be enforced is named."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from troth.contracts.grammar import Grammar
from troth.errors import RequestError
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.grammar import COMPILE_TIMEOUT_S, GrammarCompiler
from troth.text.grammar_schema import MAX_DEPTH, MAX_DIVISOR, MAX_NODES, MAX_OPTIONAL, MAX_PROPERTIES, read_schema

COMPILER = GrammarCompiler(ByteTokenizer(), ByteTokenizer.vocab_size)


def compiled(schema: Any, *, strict: bool = True) -> tuple[str, ...]:
    """What of a schema is not enforced."""
    source = schema if isinstance(schema, str) else json.dumps(schema)
    return COMPILER.compile(Grammar(kind="json_schema", source=source, strict=strict), param="field").not_enforced


def refused(schema: Any, *, strict: bool = True) -> RequestError:
    with pytest.raises(RequestError) as caught:
        compiled(schema, strict=strict)
    assert caught.value.param == "field"
    assert len(str(caught.value)) < 600
    return caught.value


def chain(length: int, link: Any = None) -> dict[str, Any]:
    """References that lead from one to the next."""
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": {**definitions, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "#/properties/a/type"),
        ({"properties": {"a/b~c": {"type": ["string", 5]}}}, "#/properties/a~1b~0c/type"),
        ({"properties": {"a": 5}}, "#/properties/a"),
        ({"properties": []}, "#/properties"),
        ({"items": [{"type": "string"}]}, "#/items"),
        ({"anyOf": []}, "#/anyOf"),
        ({"anyOf": [{}, {"enum": []}]}, "#/anyOf/1/enum"),
        ({"required": "a"}, "#/required"),
        ({"pattern": 5}, "#/pattern"),
        ({"multipleOf": 0}, "#/multipleOf"),
        ({"multipleOf": "2"}, "#/multipleOf"),
        ({"items": {"$ref": "other.json#/a"}}, "#/items/$ref"),
        ({"items": {"$ref": "#/$defs/a"}}, "#/items/$ref"),
        ({"items": {"$ref": "#/description"}, "description": "x"}, "#/items/$ref"),
        # What the compiler itself finds is traced to the innermost part.
        ({"properties": {"a": {"items": {"type": "string", "pattern": "(a"}}}}, "#/properties/a/items/pattern"),
        (
            {"type": "array", "minItems": 1, "prefixItems": [{"minimum": 5, "maximum": 2, "type": "integer"}]},
            "#/prefixItems/0",
        ),
        ({"$defs": {"a": {"pattern": "(?=a)"}}, "anyOf": [{"$ref": "#/$defs/a"}]}, "#/$defs/a/pattern"),
        ({"properties": {'é "b': {"type": "string", "pattern": "("}}}, '#/properties/é "b/pattern'),
        ({"additionalProperties": False, "properties": {"a": {"pattern": "("}}}, "#/properties/a/pattern"),
        (
            {"properties": {"a": {"pattern": "a", "patternProperties": {"b/c(": {}}}}},
            "#/properties/a/patternProperties/b~1c(",
        ),
        ({"properties": {"a": False, "b": False}, "required": ["b"]}, "#/properties/b"),
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
            "#/$defs/x/allOf/0",
        ),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
    ],
)
def test_schema_with_a_fault_is_refused_by_its_pointer(schema: Any, pointer: str) -> None:
    error = refused({"type": "object", **schema} if "properties" in schema else schema)
    assert error.code == "invalid_schema"
    assert f"at {pointer}:" in str(error)


def test_schema_with_a_pattern_at_fault_is_refused_with_the_pattern() -> None:
    long = "a" * 100
    for pattern, said in (("a(?=\\d)", '"a(?=\\\\d)"'), (f"({long}", f'"({long[:79]}"')):
        error = refused({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})
        assert "at #/properties/a/pattern: cannot be compiled: character " in str(error)
        assert str(error).endswith(f", in the pattern {said}")


@pytest.mark.parametrize(
    "source",
    ["{", "[1]", "5", '"text"', '{"minimum": NaN}', "", "{'type': 'object'}", '{"const": Infinity}', "[" * 100_000],
    ids=lambda source: source[:20],
)
def test_schema_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_schema(source, strict=False, param="field")
    assert (caught.value.param, caught.value.code) == ("field", "invalid_schema")


KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "#/not"),
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
    ({"type": "array", "contains": {"type": "string"}}, "#/contains"),
    ({"if": {}, "then": {}}, "#/if"),
    ({"type": "string", "format": "iri"}, "#/format"),
    ({"type": "object", "properties": {"a": {"nullable": True}}}, "#/properties/a/nullable"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "#/propertyNames"),
    ({"type": "integer", "multipleOf": 99999989}, "#/multipleOf"),
    ({"frobnicate": 1}, "#/frobnicate"),
    # The compiler rounds these to another number, or cuts them to 64 bits; the first two crashed the process.
    ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "#/minimum"),
    ({"type": "integer", "minimum": -(10**30), "maximum": -(10**29)}, "#/minimum"),
    ({"type": "integer", "maximum": -(10**29)}, "#/maximum"),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "#/minimum"),
    ({"type": "integer", "minimum": 10**30, "maximum": 10**30 + 1}, "#/minimum"),
    ({"type": "integer", "exclusiveMinimum": 2**53 + 1}, "#/exclusiveMinimum"),
    ({"const": 2**53 + 1}, "#/const"),
    ({"enum": ["a", {"id": [1234567890123456789]}]}, "#/enum"),
]


@pytest.mark.parametrize(("schema", "pointer"), KEYWORDS, ids=[json.dumps(schema)[:60] for schema, _ in KEYWORDS])
def test_schema_keyword_that_cannot_be_enforced_is_refused_when_strict_and_named_otherwise(
    schema: dict[str, Any], pointer: str
) -> None:
    error = refused(schema)
    assert error.code == "unsupported_schema"
    assert f"at {pointer}:" in str(error)
    assert pointer in compiled(schema, strict=False)


def test_schema_bounds_as_wide_as_integers_of_64_bits_are_enforced() -> None:
    assert compiled({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}) == ()
    assert compiled({"type": "integer", "minimum": -(2**62), "maximum": 2**53}) == ()
    assert compiled({"enum": [2**53, -(2**53), True, 1e300]}) == ()


def test_schema_annotations_and_extensions_are_no_constraints() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/city",
        "title": "City",
        "type": "object",
        "properties": {"a": {"type": "string", "description": "x", "default": 3, "x-order": 1}, "x-b": {}},
        "uniqueItems": False,
        "x-guidance": {"whitespace_flexible": False, "lenient": True},
    }
    assert compiled(schema) == ()


def test_schema_one_of_that_overlaps_is_refused_when_strict_and_named_otherwise() -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    error = refused(schema)
    assert error.code == "unsupported_schema"
    assert "at #/oneOf:" in str(error)
    assert compiled(schema, strict=False) == ("#/oneOf",)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        False,
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"const": 1, "enum": [2]},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
@pytest.mark.parametrize("strict", [True, False])
def test_schema_that_no_answer_matches_is_refused(schema: Any, strict: bool) -> None:
    assert refused(schema, strict=strict).code in ("invalid_grammar", "invalid_schema")


def test_schema_that_leads_back_into_itself_through_a_value_compiles() -> None:
    assert compiled({"type": "object", "properties": {"next": {"$ref": "#"}}}) == ()


LIST = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        ({**LIST, "minItems": 1}, True),
        (LIST, False),
        ({**LIST, "minItems": 1, "prefixItems": [{"type": "null"}], "items": False}, False),
        ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, LIST]}}, "required": ["a"]}, False),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "minItems": 2, "items": {"$ref": "#"}}}}, True),
        (chain(200), False),
    ],
    ids=lambda value: str(value)[:60],
)
def test_schema_that_only_endless_values_match_is_refused(schema: Any, endless: bool) -> None:
    """Such an answer once went on and on until a limit cut it."""
    if endless:
        assert "without end" in str(refused(schema))
    else:
        assert compiled(schema) == ()


def test_schema_keeps_what_references_lead_to_inside_keywords_that_are_left_out() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/then/properties/a"}, "b": {"$ref": "#/else"}},
        "if": {"required": ["c"]},
        "then": {"properties": {"a": {"type": "integer"}}},
        "else": {"type": "array", "items": {"$ref": "#/else/contains"}, "contains": {"type": "string", "pattern": "("}},
    }
    error = refused(schema, strict=False)
    assert "at #/else/contains/pattern:" in str(error)
    schema["else"]["contains"] = {"type": "boolean"}  # type: ignore[index]
    assert compiled(schema, strict=False) == ("#/if", "#/then", "#/else", "#/else/contains")
    assert "if cannot be enforced" in str(refused(schema))


def test_schema_reference_is_decoded_once() -> None:
    """A name with a percent sign, in a keyword that is left out, was decoded twice and not found."""
    schema = {"$ref": "#/if/properties/a%2525b", "if": {"properties": {"a%25b": {"type": "integer"}}}}
    assert compiled(schema, strict=False) == ("#/if",)


DEEP: Any = {"type": "string"}
for _ in range(MAX_DEPTH + 1):
    DEEP = {"type": "array", "items": DEEP}

HOSTILE: dict[str, Any] = {
    "deeper than allowed": DEEP,
    "ten thousand deep": '{"items":' * 10_000 + "{}" + "}" * 10_000,
    "deep constant": '{"const":' + "[" * 10_000 + "]" * 10_000 + "}",
    "too many parts": {"anyOf": [{"const": i} for i in range(MAX_NODES + 1)]},
    "too many values": {"enum": list(range(MAX_NODES + 1))},
    "too many properties": {
        "properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)},
        "required": [f"p{i}" for i in range(MAX_PROPERTIES + 1)],
    },
    "too many properties that may be left out": {"properties": {f"p{i}": {} for i in range(MAX_OPTIONAL + 1)}},
    "unmergeable": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"const": i}}} for i in range(8)]} for j in range(8)]
    },
    "nested pattern": {"type": "string", "pattern": "(" * 10_000 + "a" + ")" * 10_000},
    "numbers of many digits": '{"type":"integer","maximum":' + "9" * 4000 + "}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schema_is_refused_in_bounded_time(name: str) -> None:
    begun = time.monotonic()
    refused(HOSTILE[name], strict=False)
    assert time.monotonic() - begun < COMPILE_TIMEOUT_S


LARGE: dict[str, Any] = {
    "choices": {"enum": [f"value {i}" for i in range(MAX_NODES - 10)]},
    "chain of references": chain(MAX_NODES // 2 - 2),
    "tree that unfolds to 2^60": {
        "$defs": {
            **{
                f"d{i}": {"type": "object", "properties": {n: {"$ref": f"#/$defs/d{i + 1}"} for n in "ab"}}
                for i in range(60)
            },
            "d60": {"type": "string"},
        },
        "$ref": "#/$defs/d0",
    },
    "long arrays": {"type": "array", "items": {"type": "string"}, "minItems": 10**9, "maxItems": 10**12},
    "long strings": {"type": "string", "minLength": 10**7, "maxLength": 10**8},
    "range": {"type": "integer", "minimum": -(10**18), "maximum": 10**18},
    "largest divisor": {"type": "integer", "multipleOf": MAX_DIVISOR},
    "catastrophic pattern": {"type": "string", "pattern": "^(a+)+$"},
    "pattern with many states": {"type": "string", "pattern": "^.*a.{200}b$"},
}


@pytest.mark.parametrize("name", LARGE)
def test_large_schema_compiles_in_bounded_time(name: str) -> None:
    """A chain of references once overflowed the stack, and the process with it."""
    begun = time.monotonic()
    assert compiled(LARGE[name]) == ()
    assert time.monotonic() - begun < COMPILE_TIMEOUT_S


def test_divisors_together_are_bounded() -> None:
    """Two divisors in one value multiply; so do their automata."""
    decimals = {"type": "object", "properties": {"a": {"multipleOf": 0.01}, "b": {"multipleOf": 5}}}
    assert compiled(decimals) == ()
    both = {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}
    assert "at #/allOf/1/multipleOf:" in str(refused(both))
    assert compiled(both, strict=False) == ("#/allOf/1/multipleOf",)
