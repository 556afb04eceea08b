"""Owns the step from a value written as text to JSON, by the types its schema allows, without losing anything.

Knows no format and no tool. Numbers keep their digits; a string schema keeps text that looks like a number. Read
next: ``unit.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from troth.text.schema_places import part_at

Types = frozenset[str]
"""Names of JSON Schema types. ``integer`` and ``number`` are told apart; all seven mean that nothing is known."""

ANY: Final[Types] = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})

ITEM: Final = "\0item"
"""The step of a path into any place of an array."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_MAX_NODES: Final = 64  # of a schema, looked at for types; a schema that needs more is treated as unknown


class DuplicateKey(ValueError):
    """An object names a key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKey(next(name for name in names if names.count(name) > 1))
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def escaped(text: str) -> str:
    """``text`` as it stands inside a JSON string; half characters as escapes, so that the result can be encoded."""
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False)[1:-1])


def parse_json(text: str) -> Any:
    """A JSON value. Raises DuplicateKey, or ValueError for anything that is not JSON (RFC 8259), depth included."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def type_names(value: Any) -> Types:
    """The JSON Schema types of a JSON value; an integral number has two."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array"}) if isinstance(value, list) else frozenset({"object"})


def json_text(text: str, types: Types, *, json_values: bool = False) -> str:
    """The JSON text of a value written as ``text`` where a value of ``types`` belongs.

    Text that is JSON of an allowed type is that value, with its digits; otherwise it is a string if one is allowed;
    otherwise it is left for validation to refuse. ``json_values``: strings too are written as JSON, in quotes.
    """
    stripped = text.strip()
    known, value = _parsed(stripped)
    if not known and types & {"boolean", "null"} and "string" not in types:
        word = {"true": "true", "false": "false", "none": "null"}.get(stripped.lower())
        if word:
            return word
    names = type_names(value) if known else frozenset[str]()
    if json_values and names & types:
        return stripped
    if known and not isinstance(value, str) and names & types:
        return stripped
    if "string" in types or not known or isinstance(value, str):
        return f'"{escaped(text)}"'
    return stripped


def _parsed(text: str) -> tuple[bool, Any]:
    try:
        return True, parse_json(text)
    except ValueError:
        return False, None


def _types(schema: Any, root: Any, left: list[int]) -> Types:
    """The types that ``schema`` (part of ``root``) lets a value have, as far as it says so plainly."""
    left[0] -= 1
    if left[0] < 0 or not isinstance(schema, Mapping):
        return ANY
    found = ANY
    declared = schema.get("type")
    if isinstance(declared, str):
        found &= _named({declared})
    elif isinstance(declared, list):
        found &= _named({name for name in declared if isinstance(name, str)})
    if isinstance(schema.get("enum"), list):
        found &= frozenset().union(*(type_names(value) for value in schema["enum"]))
    if "const" in schema:
        found &= type_names(schema["const"])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            found &= frozenset().union(*(_types(part, root, left) for part in schema[keyword]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= _types(part, root, left)
    if isinstance(schema.get("$ref"), str):
        found &= _types(resolve(root, schema["$ref"]), root, left)
    return found


def types_at(schema: Any, path: tuple[str, ...]) -> Types:
    """The types that a value at ``path`` inside a value of ``schema`` may have."""
    places = [schema]
    left = [_MAX_NODES]
    for step in path:
        places = [inner for place in places for inner in _inside(place, schema, step, left)]
    return frozenset().union(*(_types(place, schema, left) for place in places)) if places else ANY


def _inside(schema: Any, root: Any, step: str, left: list[int]) -> list[Any]:
    """Schemas of what ``step`` leads to, in whatever alternative declares it."""
    left[0] -= 1
    if left[0] < 0 or not isinstance(schema, Mapping):
        return []
    found = []
    if step == ITEM:
        found += [schema["items"]] if "items" in schema else []
    elif isinstance(schema.get("properties"), Mapping) and step in schema["properties"]:
        found.append(schema["properties"][step])
    elif isinstance(schema.get("additionalProperties"), Mapping):
        found.append(schema["additionalProperties"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        for part in schema[keyword] if isinstance(schema.get(keyword), list) else ():
            found += _inside(part, root, step, left)
    if isinstance(schema.get("$ref"), str):
        found += _inside(resolve(root, schema["$ref"]), root, step, left)
    return found


def _named(names: set[str]) -> Types:
    """An integer is a number too."""
    return frozenset(names | ({"integer"} if "number" in names else set()))


def resolve(root: Any, reference: str) -> Any:
    """What a local ``$ref`` (``#``, ``#/a/b``, percent-encoded) points to; None when nothing is there."""
    return part_at(root, unquote(reference))
