"""Takes a tool's schema apart: what a value may be, as plain alternatives of one type each, in which nothing refers
anywhere or is combined.

For notations that no compiler of schemas writes. Refuses to know notations and grammars. Read next:
``grammar_schema.py`` (what a schema may hold at all), ``call_values.py`` (writes the alternatives).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from troth.errors import RequestError
from troth.text.linear_pattern import LinearPattern, PatternError
from troth.text.schema_places import schemas_in
from troth.text.tool_formats.coercion import resolve, type_names

MAX_ALTERNATIVES: Final = 64
_MAX_DEPTH: Final = 64
_COMBINED: Final = ("$ref", "allOf", "anyOf", "oneOf", "$defs", "definitions")
TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
_KEYWORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "patterns", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
_UNWRITTEN: Final[Mapping[str, tuple[str, ...]]] = {"object": ("patternProperties", "minProperties", "maxProperties")}
_LEAST: Final = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_MOST: Final = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})

Alternative = tuple[str, dict[str, Any]]
"""A type (``integer`` too) and the keywords that bind values of it. ``enum``: these values, and no other keyword.
``patterns`` is a list, which a text matches all of."""


class SchemaParts:
    """One schema and what its parts allow.

    Args:
        root: As ``grammar_schema.read_schema`` read it.
        strict: What cannot be written is refused. False: it is left out, for validation to judge.
        refusal: The error for a keyword, and the pointer of where it stands.
    """

    def __init__(self, root: Any, *, strict: bool, refusal: Callable[[str, str], RequestError]) -> None:
        self._root = root
        self._strict = strict
        self._refusal = refusal

    def leaves_out(self, keyword: str, value: Any) -> None:
        """Say that a keyword of some value cannot be written. Raises RequestError where all must be."""
        if self._strict:
            raise self._refused(keyword, value)

    def leaves_out_pattern(self, pattern: str) -> None:
        """The same of a regular expression; also where validation could not judge it, and nobody would."""
        try:
            LinearPattern.of(pattern)
        except PatternError:
            raise self._refused("pattern", pattern) from None
        self.leaves_out("pattern", pattern)

    def _refused(self, keyword: str, value: Any) -> RequestError:
        """The error for a keyword, by the first place where it has that value."""
        places = (place for place, part in schemas_in(self._root) if keyword in part and part[keyword] == value)
        place = next(places, None)
        return self._refusal(keyword, "#" if place is None else f"{place}/{keyword}")

    def alternatives(self, schema: Any) -> list[Alternative]:
        """What a value of a schema may be; empty: nothing. Raises RequestError."""
        found: dict[str, Alternative] = {}
        for flat in self._flat(schema, 0):
            for kind in _types(flat):
                alternative = self._one_type(kind, flat)
                if alternative is not None:
                    found.setdefault(json.dumps(alternative, sort_keys=True), alternative)
        return list(found.values())

    def is_open(self, schema: Any) -> bool:
        """Whether a value may be anything."""
        return schema is True or schema == {}

    def _one_type(self, kind: str, flat: Mapping[str, Any]) -> Alternative | None:
        family = "number" if kind == "integer" else kind
        bounds = {keyword: flat[keyword] for keyword in _KEYWORDS.get(family, ()) if keyword in flat}
        for keyword in _UNWRITTEN.get(family, ()):
            if keyword in flat and "enum" not in flat:
                self.leaves_out(keyword, flat[keyword])
        if "enum" not in flat:
            return kind, bounds
        judged = {key: value for key, value in flat.items() if key not in ("enum", "patterns")}
        judged["allOf"] = [{"pattern": pattern} for pattern in flat.get("patterns", ())] or [{}]
        plain = Draft202012Validator(judged) if kind not in ("array", "object") else None
        values = [one for one in flat["enum"] if kind in type_names(one) and (plain is None or plain.is_valid(one))]
        return (kind, {"enum": values}) if values else None

    def _flat(self, schema: Any, depth: int) -> list[dict[str, Any]]:
        """The schema without references and combinations: a value matches one of these."""
        if not isinstance(schema, dict):
            return [] if schema is False else [{}]
        if depth > _MAX_DEPTH:
            raise self._refused("$ref", schema.get("$ref"))
        own = {key: value for key, value in schema.items() if key not in _COMBINED}
        if "const" in own:
            own["enum"] = [one for one in own.get("enum", [own["const"]]) if one == own["const"]]
            del own["const"]
        if "pattern" in own:
            own["patterns"] = [own.pop("pattern")]
        found: list[dict[str, Any]] = [own]
        required = [resolve(self._root, schema["$ref"])] if "$ref" in schema else []
        choices = [("$ref", self._flat(part, depth + 1)) for part in required]
        choices += [("allOf", self._flat(part, depth + 1)) for part in schema.get("allOf", ())]
        choices += self._choices(schema, depth)
        for keyword, parts in choices:
            if len(found) * len(parts) > MAX_ALTERNATIVES:
                self.leaves_out(keyword, schema[keyword])
                continue
            try:
                merged = [self._merged(one, part) for one in found for part in parts]
            except _Unmerged:
                raise self._refused(keyword, schema[keyword]) from None
            found = [one for one in merged if one is not None]
        return found

    def _choices(self, schema: Mapping[str, Any], depth: int) -> list[tuple[str, list[dict[str, Any]]]]:
        found = []
        for keyword in ("anyOf", "oneOf"):
            parts = [self._flat(part, depth + 1) for part in schema.get(keyword, ())]
            if keyword == "oneOf":
                types = [name for part in parts for name in {name for flat in part for name in _types(flat)}]
                if len(types) != len(set(types)) or {"integer", "number"} <= set(types):
                    self.leaves_out(keyword, schema[keyword])  # that no second part matches cannot be promised
            if keyword in schema:
                found.append((keyword, [flat for part in parts for flat in part]))
        return found

    def _merged(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
        """What matches both; None: nothing does."""
        one, other = _closed(one, other), _closed(other, one)
        merged = dict(one)
        for key, value in other.items():
            if key not in merged or merged[key] == value:
                merged[key] = value
            elif key in ("type", "enum"):
                merged[key] = _common_types(merged[key], value) if key == "type" else _common(merged[key], value)
                if not merged[key]:
                    return None
            elif key in ("required", "patterns"):
                merged[key] = [*merged[key], *(item for item in value if item not in merged[key])]
            elif key == "properties":
                both = {name: {"allOf": [merged[key][name], value[name]]} for name in value if name in merged[key]}
                merged[key] = {**merged[key], **value, **both}
            elif key in _LEAST or key in _MOST:
                merged[key] = (max if key in _LEAST else min)(merged[key], value)
            elif self._strict:
                raise _Unmerged
        return merged


class _Unmerged(Exception):
    """Two values of one keyword, both of which bind."""


def _closed(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """``one`` without the properties that ``other`` does not know and forbids."""
    if other.get("additionalProperties") is not False or "properties" not in one:
        return one
    known = other.get("properties", {})
    return {**one, "properties": {name: part if name in known else False for name, part in one["properties"].items()}}


def _types(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """Types of a schema, ``integer`` only where ``number`` is none of them."""
    declared = flat.get("type")
    names = set(TYPES) if declared is None else {declared} if isinstance(declared, str) else set(declared)
    if "enum" in flat:
        names &= {name for one in flat["enum"] for name in type_names(one)}
    if "number" in names:
        names.discard("integer")
    return tuple(sorted(names))


def _common_types(one: Any, other: Any) -> list[str]:
    first, second = ({part} if isinstance(part, str) else set(part) for part in (one, other))
    common = first & second
    if "integer" in first | second and "number" in first | second:
        common.add("integer")
    return sorted(common)


def _common(one: list[Any], other: list[Any]) -> list[Any]:
    texts = {json.dumps(value, sort_keys=True) for value in other}
    return [value for value in one if json.dumps(value, sort_keys=True) in texts]
