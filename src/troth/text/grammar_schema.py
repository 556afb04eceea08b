"""Reads the schema of an answer: bounded, its faults found by pointer, and what no grammar can enforce named.

JSON Schema 2020-12 as llguidance turns it into a grammar. Refuses to know tokens and to judge a value. Read next:
``grammar.py`` (compiles what comes out), ``tool_schema.py`` (judges arguments).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from math import lcm
from typing import Any, Final
from urllib.parse import unquote

from troth.errors import RequestError
from troth.text.schema_places import (
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    SCHEMAS,
    escaped,
    moved,
    part_at,
    parts_in,
    reference_to,
    schemas_in,
    shown,
    with_places,
    with_true,
)
from troth.text.schema_values import is_endless

MAX_NODES: Final = 10_000
MAX_DEPTH: Final = 64
MAX_PROPERTIES: Final = 2_000
"""Of all objects together: 2,000 optional ones of one object compile in 0.8 s, and the time grows as their square."""
MAX_OPTIONAL: Final = 480
"""Of the properties of one object those that may be left out: each is four of the 2,000 ways on that the compiler
follows at once, and one more than it follows ends the answer where the object begins.
"""
MAX_DIVISOR: Final = 10_000
"""Least common multiple of every multipleOf, without their decimal places: one of a million compiles in 15 s."""
MAX_EXACT: Final = 2**53
"""Numbers up to here mean what they say; the compiler rounds larger ones, and cuts bounds to 64 bits."""
MIN_INTEGER: Final = -(2**63)
"""What it cuts lower bounds to, and cannot take: it ends the process where the upper one is cut to it as well."""
MAX_TRIALS: Final = 200
"""Schemas compiled to find the part at fault."""
MAX_SHOWN_CHARACTERS: Final = 80
"""Of a pattern in an error."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VALUES: Final = _words(
    "type enum const required minProperties maxProperties minItems maxItems minLength maxLength pattern format "
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf $ref"
)
_BOUNDS: Final = _words("minimum maximum exclusiveMinimum exclusiveMaximum")
_ENFORCED: Final = SCHEMAS | SCHEMA_LISTS | SCHEMA_MAPS | _VALUES
_ANNOTATIONS: Final = _words(
    "title description default example examples deprecated readOnly writeOnly contentEncoding contentMediaType "
    "contentSchema discriminator $schema $id $anchor $comment $vocabulary"
)
_FORMATS: Final = _words("date-time time date duration email hostname ipv4 ipv6 uuid uri")
_TYPES: Final = _words("null boolean object array number string integer")


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """A schema that was read."""

    schema: Any
    """Without what is not enforced and what llguidance would take for settings of its own."""
    not_enforced: tuple[str, ...] = ()
    """Pointers of the keywords that were left out: ``#/properties/a/not``."""

    def patterns(self) -> Iterator[tuple[str, str]]:
        """Every regular expression in it, with its pointer."""
        for pointer, schema in schemas_in(self.schema):
            yield from ((pointer + step, pattern) for step, pattern in _patterns_of(schema))

    def fault_at(self, fault: Callable[[Any], str | None]) -> tuple[str, str | None]:
        """The innermost part that cannot be compiled by itself: its pointer, and why.

        Args:
            fault: Why a whole schema does not compile, or None.
        """
        pointer, message, part = self._innermost(fault)
        for step, pattern in _patterns_of(part):
            if (inner := fault({"type": "string", "pattern": pattern})) is not None:
                said = json.dumps(pattern[:MAX_SHOWN_CHARACTERS], ensure_ascii=False)
                return shown(pointer + step), f"{inner}, in the pattern {said}"
        return shown(pointer), message

    def _innermost(self, fault: Callable[[Any], str | None]) -> tuple[str, str | None, Any]:
        """The pointer of that part in the schema that was read, why, and the part."""
        # References still lead where they did when it stands elsewhere.
        whole = moved(self.schema, lambda reference: f"#/$defs/whole{reference[1:]}")
        num_trials = 0

        def fault_of(place: str, changed: Any = whole) -> str | None:
            nonlocal num_trials
            num_trials += 1
            return fault({"$defs": {"whole": changed}, "$ref": reference_to(f"#/$defs/whole{place[1:]}")})

        pointer, message, schema, found = "#", fault_of("#"), self.schema, True
        seen = set[str]()
        while found:
            found = False
            for step, part in parts_in(schema):
                if num_trials >= MAX_TRIALS:
                    return pointer, message, schema
                inner = fault_of(pointer + step)
                # A part without a value may be meant: what is forbidden is written like that.
                if inner is not None and (
                    inner == message or fault_of(pointer, with_true(whole, pointer + step)) != message
                ):
                    pointer, message, schema, found = pointer + step, inner, part, True
                    break
            if not found and isinstance(schema, dict) and "$ref" in schema:
                place = unquote(schema["$ref"])
                if place not in seen and fault_of(place) is not None:
                    pointer, schema, found = place, part_at(self.schema, place), True
                    seen.add(place)
        return pointer, message, schema


def read_schema(source: str, *, strict: bool, param: str, where: str = "") -> AnswerSchema:
    """Read a schema.

    What is left out may hold schemas that others refer to; these stand in ``$defs`` under the pointer they had.

    Args:
        source: JSON text.
        strict: A keyword that cannot be enforced is refused. False: it is left out and named.
        param: Field of the request in which the schema stands, for errors.
        where: Place inside that field, for their messages.

    Raises:
        RequestError: no JSON, too large or deep, a keyword of the wrong type, a reference that leads out, nowhere or
            round in a circle.
    """
    reader = _Reader(strict, param, where)
    try:
        schema = json.loads(source, parse_constant=_refuse_constant)
    except RecursionError:
        raise reader.refusal("is nested too deeply") from None
    except ValueError as error:
        raise reader.refusal(f"is not JSON: {error}") from None
    return reader.read(schema)


class _Reader:
    def __init__(self, strict: bool, param: str, where: str) -> None:
        self._strict = strict
        self._param = param
        self._where = where
        self._not_enforced: list[str] = []
        self._num_nodes = self._num_properties = 0
        self._divisor = 1
        self._places: set[str] = set()
        self._references: list[tuple[str, str]] = []
        """Pointers of references, with the places they lead to."""
        self._applied: dict[str, list[str]] = {}
        """The places of schemas that a value at another's must match as well, or may."""

    def read(self, schema: Any) -> AnswerSchema:
        kept, beside = self._read(schema, "#", 0), dict[str, Any]()
        for pointer, place in self._references:  # grows by those inside what they lead to
            if place in self._places:
                continue
            part = None if self._strict else part_at(schema, place)
            if not isinstance(part, dict | bool):
                raise self.refusal(f"leads to {place[:100]!r}, where no schema is", pointer)
            beside[place] = self._read(part, place, 0)
        self._refuse_circles()
        kept = with_places(kept, beside) if beside else kept
        if is_endless(kept):
            raise self.refusal("asks of every value to hold another of its kind, without end", "#")
        return AnswerSchema(kept, tuple(self._not_enforced))

    def _refuse_circles(self) -> None:
        """No part may lead to itself without going into the value: no value would ever be found for it."""
        done, path = set[str](), dict[str, None]()
        for root in self._applied:
            waiting = [root]
            while waiting:
                place = waiting.pop()
                if place in path:  # all it leads to was looked at
                    del path[place]
                    done.add(place)
                elif place not in done:
                    path[place] = None
                    following = self._applied.get(place, ())
                    if any(one in path for one in following):
                        raise self.refusal("leads round in a circle", place)
                    waiting += [place, *following]

    def refusal(self, message: str, pointer: str = "") -> RequestError:
        place = f" at {pointer[:300]}:" if pointer else ""
        return RequestError(
            f"{self._param}{self._where}: the schema{place} {message}", param=self._param, code="invalid_schema"
        )

    def _count(self, num_nodes: int) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise self.refusal(f"has more than {MAX_NODES} parts")

    def _read(self, schema: Any, pointer: str, depth: int) -> Any:
        self._places.add(pointer)
        self._count(1)
        if depth > MAX_DEPTH:
            raise self.refusal(f"is nested deeper than {MAX_DEPTH}", pointer)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self.refusal("must be a schema, an object or a boolean", pointer)
        self._count_optional(schema, pointer)
        self._applied[pointer] = [
            f"{pointer}/{keyword}/{i}"
            for keyword in ("allOf", "anyOf", "oneOf")
            for i in range(len(schema[keyword]) if isinstance(schema.get(keyword), list) else 0)
        ]
        return {
            keyword: self._read_value(keyword, value, f"{pointer}/{escaped(keyword)}", depth)
            for keyword, value in schema.items()
            if self._keeps(keyword, value, f"{pointer}/{escaped(keyword)}")
        }

    def _count_optional(self, schema: dict[str, Any], pointer: str) -> None:
        properties, required = schema.get("properties"), schema.get("required")
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        if isinstance(properties, dict) and len(properties.keys() - names) > MAX_OPTIONAL:
            raise self.refusal(
                f"has more than {MAX_OPTIONAL} properties of one object that may be left out; require some", pointer
            )

    def _keeps(self, keyword: str, value: Any, pointer: str) -> bool:
        """Whether a keyword stays in the schema. Raises RequestError where it must and cannot."""
        if keyword in _ANNOTATIONS or keyword.startswith("x-"):
            return False
        if keyword == "multipleOf":
            enforced = self._divides(value, pointer)
        elif keyword in _BOUNDS:
            enforced = _bounds(keyword, value)
        elif keyword == "const" or (keyword == "enum" and isinstance(value, list)):
            enforced = _is_exact(value)
        elif keyword == "format":
            enforced = value in _FORMATS if isinstance(value, str) else True
        elif keyword == "uniqueItems" and value is False:
            return False
        else:
            enforced = keyword in _ENFORCED
        if keyword == "oneOf" and not self._strict:
            self._not_enforced.append(pointer)  # as anyOf: that no second part matches cannot be promised
        if enforced:
            return True
        if self._strict:
            raise RequestError(
                f"{self._param}{self._where}: the schema at {pointer[:300]}: {keyword[:80]} cannot be enforced while "
                "generating; leave it out, or set strict to false",
                param=self._param,
                code="unsupported_schema",
            )
        self._not_enforced.append(pointer)
        return False

    def _divides(self, value: Any, pointer: str) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.refusal("must be a number above 0", pointer)
        digits = int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits)))
        divisor = lcm(self._divisor, digits)
        if divisor > MAX_DIVISOR:
            return False
        self._divisor = divisor
        return True

    def _read_value(self, keyword: str, value: Any, pointer: str, depth: int) -> Any:
        if keyword in SCHEMAS:
            return self._read(value, pointer, depth + 1)
        if keyword in SCHEMA_LISTS:
            if not isinstance(value, list) or not value:
                raise self.refusal("must be an array of schemas, and not empty", pointer)
            return [self._read(part, f"{pointer}/{i}", depth + 1) for i, part in enumerate(value)]
        if keyword in SCHEMA_MAPS:
            return self._read_map(keyword, value, pointer, depth)
        self._check(keyword, value, pointer)
        return value

    def _read_map(self, keyword: str, value: Any, pointer: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refusal("must be an object of schemas", pointer)
        if keyword in ("properties", "patternProperties"):
            self._num_properties += len(value)
            if self._num_properties > MAX_PROPERTIES:
                raise self.refusal(f"has more than {MAX_PROPERTIES} properties", pointer)
        return {name: self._read(part, f"{pointer}/{escaped(name)}", depth + 1) for name, part in value.items()}

    def _check(self, keyword: str, value: Any, pointer: str) -> None:
        match keyword:
            case "type":
                names = value if isinstance(value, list) and value else [value]
                if not all(isinstance(name, str) and name in _TYPES for name in names):
                    raise self.refusal(f"must be one of {', '.join(sorted(_TYPES))}, or some", pointer)
            case "enum":
                if not isinstance(value, list) or not value:
                    raise self.refusal("must be an array of values, and not empty", pointer)
                self._count(len(value))
            case "required":
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise self.refusal("must be an array of names", pointer)
                self._count(len(value))
            case "pattern" | "format":
                if not isinstance(value, str):
                    raise self.refusal("must be a string", pointer)
            case "$ref":
                if not isinstance(value, str) or (value != "#" and not value.startswith("#/")):
                    raise self.refusal("must be a place inside the schema (#/..)", pointer)
                self._references.append((pointer, unquote(value)))
                self._applied[pointer.removesuffix("/$ref")].append(unquote(value))


def _patterns_of(schema: Any) -> Iterator[tuple[str, str]]:
    """The regular expressions of one schema itself, each with the rest of its pointer."""
    if isinstance(schema, dict):
        if "pattern" in schema:
            yield "/pattern", schema["pattern"]
        for pattern in schema.get("patternProperties", ()):
            yield f"/patternProperties/{escaped(pattern)}", pattern


def _bounds(keyword: str, bound: Any) -> bool:
    """Whether no value passes the bound that is compiled and not the one that is meant."""
    if not isinstance(bound, int | float):
        return True  # the compiler refuses its type
    if keyword in ("minimum", "exclusiveMinimum"):
        return MIN_INTEGER < bound <= MAX_EXACT and float(bound) > MIN_INTEGER
    return bound >= -MAX_EXACT


def _is_exact(value: Any) -> bool:
    """Whether every integer in a value is compiled as it is."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int) and abs(one) > MAX_EXACT:
            return False
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
