"""Owns places inside schemas: the schemas in one, their JSON pointers, and references that follow a part that moves.

Of the keywords that can be enforced while generating. Refuses to judge any. Read next: ``grammar_schema.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

SCHEMAS: Final = frozenset({"additionalProperties", "items"})
"""Keywords whose value is a schema."""
SCHEMA_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMA_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_MOVED: Final = "moved from "
_BESIDE: Final = f"#/$defs/{_MOVED}"


def schemas_in(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema that was read and all inside it, outer ones first, with their pointers; not those that are booleans."""
    waiting = deque([("#", schema)])
    while waiting:
        pointer, part = waiting.popleft()
        if isinstance(part, dict):
            yield shown(pointer), part
            waiting.extend((pointer + step, inner) for step, inner in parts_in(part))


def parts_in(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, with the rest of their pointers."""
    for keyword, value in schema.items() if isinstance(schema, Mapping) else ():
        if keyword in SCHEMAS:
            yield f"/{keyword}", value
        elif keyword in SCHEMA_LISTS:
            yield from ((f"/{keyword}/{i}", part) for i, part in enumerate(value))
        elif keyword in SCHEMA_MAPS:
            yield from ((f"/{keyword}/{escaped(name)}", part) for name, part in value.items())


def part_at(schema: Any, pointer: str) -> Any:
    """The part of a schema at a pointer (``#``, ``#/a/b``); None: there is nothing."""
    if pointer == "#":
        return schema
    if not pointer.startswith("#/"):
        return None
    part = schema
    for step in map(_unescaped, pointer[2:].split("/")):
        if isinstance(part, Mapping):
            part = part.get(step)
        elif isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        else:
            return None
    return part


def moved(schema: Any, place_of: Callable[[str], str]) -> Any:
    """A schema whose references lead elsewhere."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for keyword, value in schema.items():
        if keyword == "$ref":
            copy[keyword] = place_of(value)
        elif keyword in SCHEMAS:
            copy[keyword] = moved(value, place_of)
        elif keyword in SCHEMA_LISTS:
            copy[keyword] = [moved(part, place_of) for part in value]
        elif keyword in SCHEMA_MAPS:
            copy[keyword] = {name: moved(part, place_of) for name, part in value.items()}
    return copy


def with_places(schema: Any, beside: Mapping[str, Any]) -> Any:
    """A schema with parts from places that it does not have any more in its ``$defs``, named after these."""

    def place_of(reference: str) -> str:
        place = unquote(reference)
        around = [one for one in beside if place == one or place.startswith(f"{one}/")]
        if not around:
            return reference
        known = max(around, key=len)  # one that was left out of another has its own
        return reference_to(f"{_BESIDE}{escaped(known)}{place.removeprefix(known)}")

    definitions = {**schema.get("$defs", {}), **{_MOVED + place: part for place, part in beside.items()}}
    return moved({**schema, "$defs": definitions}, place_of)


def with_true(schema: Any, pointer: str) -> Any:
    """A schema in which the part at a pointer takes any value."""
    return _with_true(schema, [_unescaped(step) for step in pointer.split("/")[1:]])


def _with_true(schema: Any, steps: list[str]) -> Any:
    if not steps:
        return True
    if isinstance(schema, list):
        return [_with_true(part, steps[1:]) if str(i) == steps[0] else part for i, part in enumerate(schema)]
    return {**schema, steps[0]: _with_true(schema[steps[0]], steps[1:])}


def shown(pointer: str) -> str:
    """A pointer as the caller's own schema has it."""
    if not pointer.startswith(_BESIDE):
        return pointer
    name, *rest = pointer.removeprefix(_BESIDE).split("/")
    return "/".join([_unescaped(name), *rest])


def reference_to(pointer: str) -> str:
    """A pointer as references write it, percent-encoded."""
    return "#" + quote(pointer[1:], safe="/~")


def escaped(name: str) -> str:
    """A name as a step of a pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _unescaped(step: str) -> str:
    return step.replace("~1", "/").replace("~0", "~")
