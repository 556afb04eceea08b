"""Owns one tool's schema: bounded when it is declared, and then the judge of arguments.

JSON Schema 2020-12 through jsonschema, references inside the schema only; patterns run in linear time. Knows no wire
format. Limits: design notes 4.7. Read next: ``tool_calls.py``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import ValidationError, best_match  # type: ignore[import-untyped]
from jsonschema.validators import extend  # type: ignore[import-untyped]
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing import Registry
from referencing.exceptions import Unresolvable

from troth.contracts.bounds import shown_json
from troth.errors import RequestError
from troth.text.linear_pattern import LinearPattern, PatternError
from troth.text.schema_places import escaped
from troth.text.tool_formats.coercion import Types, resolve, types_at

MAX_SCHEMA_NODES: Final = 4096
MAX_SCHEMA_DEPTH: Final = 64
MAX_ENUM: Final = 256
MAX_INSTANCE_NODES: Final = 8192
MAX_MEMBERS: Final = 256
"""Arguments of one object; places of one array are bounded by ``MAX_INSTANCE_NODES`` alone."""

_MAX_PATTERN_STEPS: Final = 2_000_000  # about a second

_SUBSCHEMA: Final = frozenset(
    {"not", "if", "then", "else", "items", "contains", "additionalProperties", "propertyNames"}
    | {"unevaluatedItems", "unevaluatedProperties", "contentSchema"}
)
_SUBSCHEMA_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SUBSCHEMA_MAPS: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_IN_PLACE: Final = frozenset({"not", "if", "then", "else", "allOf", "anyOf", "oneOf", "dependentSchemas"})
_PLAIN: Final = frozenset(
    {"type", "enum", "const", "required", "minProperties", "maxProperties", "dependentRequired", "minContains"}
    | {"maxContains", "minItems", "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format"}
    | {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding"}
    | {"contentMediaType", "$schema", "$id", "$anchor", "$comment", "$ref", "$vocabulary"}
)
_KEYWORDS: Final = _SUBSCHEMA | _SUBSCHEMA_LISTS | _SUBSCHEMA_MAPS | _PLAIN
_OF_TYPES: Final = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
"""Keywords that say of which types a value may be."""
_MAX_STEPS: Final = 100_000
"""Keywords applied in one validation, about a second; alternatives of alternatives need any number."""
_work = threading.local()


def _compiled(pattern: str) -> LinearPattern | None:
    """None for a pattern that cannot be matched here; it is one of the schema's ``notices``."""
    try:
        return LinearPattern.of(pattern)
    except PatternError:
        return None


def _matches(pattern: str, text: str, *, unknown: bool) -> bool:
    """Whether ``text`` matches; ``unknown`` when that cannot be told."""
    compiled = _compiled(pattern)
    if compiled is None:
        return unknown
    if len(text) * compiled.num_states > _MAX_PATTERN_STEPS:
        raise ValidationError(f"a text of {len(text)} characters is too long for the pattern {pattern[:80]!r}")
    return compiled.search(text)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance, unknown=True):
        yield ValidationError(f"{instance[:80]!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    for pattern, subschema in patterns.items() if isinstance(instance, dict) else ():
        for key, value in instance.items():
            if _matches(pattern, key, unknown=False):
                yield from validator.descend(value, subschema, path=key, schema_path=pattern)


def _additional_properties(validator: Any, subschema: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    for key in instance:
        if key in known or any(_matches(pattern, key, unknown=True) for pattern in patterns):
            continue
        if subschema is False:
            yield ValidationError(f"{key[:80]!r} is not one of the declared properties")
        else:
            yield from validator.descend(instance[key], subschema, path=key)


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if wanted and isinstance(instance, list) and len({_canonical(item) for item in instance}) < len(instance):
        yield ValidationError("has the same item twice")


def _canonical(value: Any) -> str:
    """One text for equal values: 1 and 1.0 are equal, the order of keys does not matter."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_canonical(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def _counted(keyword: Any) -> Any:
    """``keyword``, each use of it counted as work."""

    def apply(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        _work.left -= 1
        if _work.left < 0:
            raise _TooMuchWork
        return keyword(validator, value, instance, schema)

    return apply


class _TooMuchWork(Exception):
    """A validation that would take too long."""


_OWN: Final = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}
_Validator: Final = extend(
    Draft202012Validator,
    {keyword: _counted(_OWN.get(keyword, apply)) for keyword, apply in Draft202012Validator.VALIDATORS.items()},
)


def _flat(part: Any, definitions: Mapping[str, Any]) -> Any:
    """A part of the standard's schema of schemas that looks at one schema and not at those inside it."""
    if not isinstance(part, Mapping):
        return part
    if "$dynamicRef" in part:
        return {"type": ["object", "boolean"]}
    named = definitions[part["$ref"].removeprefix("#/$defs/")] if "$ref" in part else {}
    own = {key: value for key, value in part.items() if key not in ("$ref", "format", "default")}
    if isinstance(own.get("anyOf"), list):
        own["anyOf"] = [_flat(one, definitions) for one in own["anyOf"]]
    own |= {
        key: _flat(own[key], definitions) for key in ("items", "additionalProperties", "propertyNames") if key in own
    }
    return {**(_flat(named, definitions) if named else {}), **own}


def _keyword_schemas() -> dict[str, Any]:
    """What the value of each keyword of JSON Schema 2020-12 must be."""
    found: dict[str, Any] = {"definitions": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}}}
    whole = Draft202012Validator.META_SCHEMA
    for reference in whole["allOf"]:
        vocabulary = REGISTRY.contents(whole["$id"].removesuffix("schema") + reference["$ref"])
        definitions = vocabulary.get("$defs", {})
        found |= {keyword: _flat(part, definitions) for keyword, part in vocabulary["properties"].items()}
    return found


_ONE_SCHEMA: Final = Draft202012Validator({"type": ["object", "boolean"], "properties": _keyword_schemas()})
"""Judges one schema, each in its turn: 0.05 ms. The standard's own way down through all of them takes ten times that,
two seconds for the tools of a busy agent."""


class ToolSchema:
    """The compiled schema of one tool's arguments. Validation has no side effects."""

    def __init__(self, schema: Mapping[str, Any] | bool, *, param: str, strict_keywords: bool = False) -> None:
        """Compile ``schema``.

        Args:
            schema: JSON Schema 2020-12, plain JSON values.
            param: Where it stands in the request, for errors.
            strict_keywords: Refuse keywords that are neither of the standard nor ``x-..``, and patterns that cannot be
                matched in linear time; else they are ``notices``.

        Raises:
            RequestError: not a schema, too large or deep, or a reference that leads out, nowhere or round in a circle.
        """
        self._param = param
        self.schema: Final[Any] = schema
        self.notices: tuple[str, ...] = ()
        """Keywords and patterns that are not checked."""
        self.num_parts: Final = self._inspect(strict_keywords)
        """Schemas in it, itself included."""
        self._refuse_circles()
        self._validator = _Validator(schema, registry=Registry())

    def fault(self, arguments: Any) -> tuple[str, str] | None:
        """What is wrong with ``arguments``, as a JSON pointer and a sentence; None when they are valid."""
        too_large = _oversize(arguments)
        if too_large:
            return "", too_large
        error: ValidationError | None
        _work.left = _MAX_STEPS
        try:
            error = next(iter(self._validator.iter_errors(arguments)), None)
        except Unresolvable:
            return "", "the schema refers to something that is not there"
        except _TooMuchWork:
            return "", "checking the arguments against the schema takes too long"
        except RecursionError:
            return "", "the schema and the arguments nest too deeply"
        except ValidationError as refusal:
            return "", str(refusal.message)
        if error is None:
            return None
        return _pointer(error), _said(error)[:500]

    def _refusal(self, message: str, pointer: str = "#") -> RequestError:
        place = f" at {pointer[:300]}" if pointer != "#" else ""
        return RequestError(f"the schema{place} {message}", param=self._param, code="invalid_schema")

    def require_objects(self) -> None:
        """Raise RequestError where the schema plainly allows no object, so that no arguments are ever valid."""
        pointer = "#"
        if isinstance(self.schema, Mapping):
            if "object" not in types_at(self.schema, ()):
                pointers = (f"#/{one}" for one in _OF_TYPES if "object" not in self._types_by(one))
                pointer = next(pointers, "#")
            elif "not" in self.schema and _takes_every_object(self.schema["not"]):
                pointer = "#/not"
            else:
                return
        if self.schema is not True:
            raise self._refusal("allows no object, which the arguments of a call are", pointer)

    def _types_by(self, keyword: str) -> Types:
        """The types that one keyword of the schema leaves."""
        others = {name: value for name, value in self.schema.items() if name == keyword or name not in _OF_TYPES}
        return types_at(others, ())

    def _inspect(self, strict_keywords: bool) -> int:
        """Look at every part; how many there are."""
        waiting: list[tuple[Any, str, int]] = [(self.schema, "#", 0)]
        num_nodes, unknown, used = 0, set[str](), set[str]()
        while waiting:
            schema, pointer, depth = waiting.pop()
            num_nodes += 1
            if num_nodes > MAX_SCHEMA_NODES:
                raise self._refusal(f"has more than {MAX_SCHEMA_NODES} parts")
            if depth > MAX_SCHEMA_DEPTH:
                raise self._refusal(f"is nested deeper than {MAX_SCHEMA_DEPTH}", pointer)
            error = best_match(_ONE_SCHEMA.iter_errors(schema))
            if error is not None:
                raise self._refusal(f"is not a JSON Schema: {_said(error)[:200]}", pointer + _pointer(error))
            if isinstance(schema, Mapping):
                unknown |= {key for key in schema if key not in _KEYWORDS and not str(key).startswith("x-")}
                used |= schema.keys()
                self._inspect_plain(schema, pointer)
                unknown |= {f"pattern {pattern[:80]!r}" for pattern in _patterns(schema) if not _compiled(pattern)}
                waiting += ((part, f"{pointer}/{step}", depth + 1) for step, part in _parts(schema))
        if {"unevaluatedProperties", "patternProperties"} <= used:
            raise self._refusal("has both unevaluatedProperties and patternProperties, which cannot be checked safely")
        if unknown and strict_keywords:
            raise self._refusal(f"has what cannot be checked: {', '.join(sorted(unknown))}")
        self.notices = tuple(sorted(unknown))
        return num_nodes

    def _inspect_plain(self, schema: Mapping[str, Any], pointer: str) -> None:
        enum = schema.get("enum")
        if isinstance(enum, list) and len(enum) > MAX_ENUM:
            raise self._refusal(f"has an enum of {len(enum)} values; {MAX_ENUM} are allowed", pointer)
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise self._refusal(f"uses {keyword}; only local $ref is supported", pointer)
        reference = schema.get("$ref")
        if isinstance(reference, str) and resolve(self.schema, reference) is None:
            raise self._refusal(
                f"refers to {reference[:100]!r}; only places inside it (#/..) can be referred to", f"{pointer}/$ref"
            )

    def _refuse_circles(self) -> None:
        """No part may lead to itself without going into the instance: checking it would never end."""
        state: dict[int, Literal["open", "done"]] = {}
        for pointer, root in list(_walk(self.schema)):
            stack: list[tuple[Any, bool]] = [(root, False)]
            while stack:
                schema, leaving = stack.pop()
                if leaving:
                    state[id(schema)] = "done"
                elif state.get(id(schema)) == "open":
                    raise self._refusal("has a $ref that leads round in a circle", pointer)
                elif id(schema) not in state and isinstance(schema, Mapping):
                    state[id(schema)] = "open"
                    stack.append((schema, True))
                    stack += ((part, False) for step, part in _parts(schema) if step.partition("/")[0] in _IN_PLACE)
                    if isinstance(schema.get("$ref"), str):
                        stack.append((resolve(self.schema, schema["$ref"]), False))


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(schema.get("pattern"), str):
        yield schema["pattern"]
    if isinstance(schema.get("patternProperties"), Mapping):
        yield from schema["patternProperties"]


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, each with the rest of its pointer, which begins with a keyword."""
    for keyword, value in schema.items():
        if keyword in _SUBSCHEMA:
            yield keyword, value
        elif keyword in _SUBSCHEMA_LISTS and isinstance(value, list):
            yield from ((f"{keyword}/{place}", part) for place, part in enumerate(value))
        elif keyword in _SUBSCHEMA_MAPS and isinstance(value, Mapping):
            yield from ((f"{keyword}/{escaped(str(name))}", part) for name, part in value.items())


def _walk(schema: Any) -> Iterator[tuple[str, Any]]:
    waiting = [("#", schema)]
    while waiting:
        pointer, part = waiting.pop()
        if isinstance(part, Mapping):
            yield pointer, part
            waiting += ((f"{pointer}/{step}", inner) for step, inner in _parts(part))


def _pointer(error: ValidationError) -> str:
    """To the part of what was judged that is at fault."""
    return "".join(f"/{escaped(str(part))}" for part in error.absolute_path)


def _said(error: ValidationError) -> str:
    """What is wrong, where the words begin with a value that is written otherwise in JSON in those of JSON."""
    value, message = error.instance, str(error.message)
    if value is None or isinstance(value, bool):
        return message if not message.startswith(repr(value)) else shown_json(value) + message[len(repr(value)) :]
    return message


def _takes_every_object(schema: Any) -> bool:
    return schema is True or (
        isinstance(schema, Mapping) and schema.keys() <= {"type"} and "object" in types_at(schema, ())
    )


def _oversize(arguments: Any) -> str | None:
    """Why arguments are too much to be checked."""
    waiting, num_nodes = [arguments], 0
    while waiting:
        value = waiting.pop()
        num_nodes += 1
        if num_nodes > MAX_INSTANCE_NODES:
            return f"more than {MAX_INSTANCE_NODES} values"
        if isinstance(value, dict):
            if len(value) > MAX_MEMBERS:
                return f"more than {MAX_MEMBERS} arguments in one object"
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return None
