"""Owns the copy of tool declarations that a template sees: always renderable, whatever schema a client sent.

Validates no call; that uses the original schema. Read next: ``chat_renderer.py`` (renders the copy).

Templates walk schemas themselves and expect a scalar type, an object of properties and plain text. So in the copy

- a union of types becomes its first one that is not null, with ``nullable`` true when null was among them, and so do
  ``anyOf`` and ``oneOf`` of one plain schema and null;
- a schema that is true, false, missing or no object becomes one that any template can write out;
- ``additionalProperties`` true or false is left out; a missing description becomes an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from troth.errors import RequestError

MAX_SCHEMA_DEPTH: Final = 64
_FALLBACK: Final = {"type": "object", "properties": {}}
_NULLABLE: Final = "null"
_SCHEMA_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMA_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS: Final = frozenset(
    {"items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedProperties"}
)


def declarations_for_template(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI tool declarations with schemas a template can walk; the given ones are not changed.

    A bare function, without the ``type`` and ``function`` around it, is taken too.

    Raises:
        RequestError: a tool that is no object or has no name, or a schema nested too deeply; ``param`` names it.
    """
    return [_declaration(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def with_every_field(declared: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Declarations for templates that read a property's fields without asking whether they are there (Command R)."""
    return [
        {**tool, "function": {**tool["function"], "parameters": _fill(tool["function"]["parameters"])}}
        for tool in declared
    ]


def _fill(schema: Mapping[str, Any]) -> dict[str, Any]:
    filled = {"description": "", "type": "string", **schema}
    if filled["type"] == "object":
        filled.setdefault("additionalProperties", {"type": "string"})
    properties = filled.get("properties")
    if isinstance(properties, Mapping):
        filled["properties"] = {name: _fill(item) for name, item in properties.items()}
    if filled["type"] == "array":
        filled["items"] = _fill(filled.get("items", {}))
    return filled


def _declaration(tool: object, place: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{place} must be an object, not {type(tool).__name__}", param=place, code="invalid_type")
    function = tool.get("function", tool if "name" in tool else None)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} has no function with a name", param=f"{place}.function")
    description = function.get("description")
    copied = {
        **function,
        "description": description if isinstance(description, str) else "",
        "parameters": _parameters(function.get("parameters"), f"{place}.function.parameters"),
    }
    wrapper = {name: value for name, value in tool.items() if name != "function"} if "function" in tool else {}
    return {**wrapper, "type": "function", "function": copied}


def _parameters(schema: object, place: str) -> dict[str, Any]:
    """The schema of all arguments: an object with properties."""
    if not isinstance(schema, Mapping):
        return dict(_FALLBACK)
    copied: dict[str, Any] = _schema(schema, place, 0)
    if copied.get("type") != "object":
        copied["type"] = "object"
    copied.setdefault("properties", {})
    return copied


def _schema(schema: object, place: str, depth: int) -> Any:
    if depth > MAX_SCHEMA_DEPTH:
        raise RequestError(f"{place} nests more than {MAX_SCHEMA_DEPTH} schemas", param=place)
    if not isinstance(schema, Mapping):
        return {}  # true, false, or not a schema: anything goes, and validation has the original
    copied: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _SCHEMA_MAPS:
            copied[name] = (
                {key: _schema(item, place, depth + 1) for key, item in value.items()}
                if isinstance(value, Mapping)
                else {}
            )
        elif name in _SCHEMA_LISTS and isinstance(value, list):
            copied[name] = [_schema(item, place, depth + 1) for item in value]
        elif name in _SCHEMAS:
            if isinstance(value, Mapping):
                copied[name] = _schema(value, place, depth + 1)
            elif name == "items":
                copied[name] = {}
        else:
            copied[name] = value
    return _scalar_type(_without_null_branch(copied))


def _scalar_type(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type")
    if kinds is None or isinstance(kinds, str):
        return schema
    names = [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []
    others = [name for name in names if name != _NULLABLE]
    if not names:
        del schema["type"]
        return schema
    schema["type"] = others[0] if others else _NULLABLE
    if others and len(others) < len(names):
        schema["nullable"] = True
    return schema


def _without_null_branch(schema: dict[str, Any]) -> dict[str, Any]:
    """``anyOf`` of one schema and null, as Python's optional types are written, is that schema, nullable."""
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        if "type" in schema or not isinstance(branches, list) or len(branches) != 2:
            continue
        others = [branch for branch in branches if branch != {"type": _NULLABLE}]
        if len(others) == 1 and isinstance(others[0].get("type"), str):
            rest = {key: value for key, value in schema.items() if key != name}
            return {**others[0], **rest, "nullable": True}
    return schema
