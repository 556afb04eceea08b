"""Reads ``response_format``, in the form of the public OpenAI API reference, into a grammar.

Refuses to know HTTP and tokens. Read next: ``contracts/grammar.py`` (what comes out), ``grammar.py`` (compiles it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from troth.contracts.bounds import mistyped_json, shown_json
from troth.contracts.grammar import Grammar
from troth.errors import RequestError

FORMATS: Final = ("text", "json_object", "json_schema")


def read_response_format(value: object, *, param: str = "response_format") -> Grammar | None:
    """The grammar of a response format; None for text.

    Args:
        value: ``{"type": "text"}``, ``{"type": "json_object"}`` or ``{"type": "json_schema", "json_schema": {"schema":
            ..., "strict": ...}}``; other keys are left alone.
        param: where it stands, for errors.

    Raises:
        RequestError: another type, a schema that is missing, or a value of the wrong type.
    """
    if not isinstance(value, Mapping):
        raise mistyped_json(param, "an object", value)
    kind = value.get("type")
    if kind is None:
        raise RequestError(
            f"{param}.type is required: {', '.join(FORMATS)}",
            param=f"{param}.type",
            code="missing_required_parameter",
        )
    if kind not in FORMATS:
        raise RequestError(
            f"{param}.type must be one of {', '.join(FORMATS)}, not {shown_json(kind)}", param=f"{param}.type"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_object")
    place = f"{param}.json_schema"
    inner = value.get("json_schema")
    if inner is None:
        raise RequestError(f"{place} is required", param=place, code="missing_required_parameter")
    if not isinstance(inner, Mapping):
        raise mistyped_json(place, "an object", inner)
    strict, schema = inner.get("strict"), inner.get("schema")
    if schema is None:
        raise RequestError(f"{place}.schema is required", param=f"{place}.schema", code="missing_required_parameter")
    if not isinstance(strict, bool | None):
        raise mistyped_json(f"{place}.strict", "true or false", strict)
    return schema_grammar(schema, strict=bool(strict), param=f"{place}.schema")


def schema_grammar(schema: object, *, strict: bool, param: str) -> Grammar:
    """The grammar of JSON that matches a schema, which is an object, true or false.

    Raises:
        RequestError: it is none of these, holds what is no JSON, or is too large.
    """
    if not isinstance(schema, Mapping | bool):
        raise mistyped_json(param, "a schema, an object", schema)
    try:
        source = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{param} is no JSON: {error}", param=param, code="invalid_schema") from None
    return grammar_from(param, kind="json_schema", source=source, strict=strict)


def grammar_from(param: str, **fields: Any) -> Grammar:
    """A grammar of these fields, which came from ``param``. Raises RequestError that names it."""
    try:
        return Grammar(**fields)
    except RequestError as error:
        message = str(error).removeprefix("grammar: ")
        raise RequestError(f"{param}: {message}", param=param, code=error.code) from None
