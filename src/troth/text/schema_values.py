"""Says of a schema that every value of it would hold another one of its kind, without end, so that there is none.

Looks at what objects and arrays must hold; nothing else makes a value endless. Refuses to know why a schema may have no
value otherwise: its compiler says that. Read next: ``grammar_schema.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from troth.text.schema_places import escaped, parts_in

_MAX_ROUNDS: Final = 16
"""References that lead on and on in the wrong order need one each; a schema that needs more is let pass."""


def is_endless(schema: Any) -> bool:
    """Whether no value of a schema, in which references lead somewhere, would ever end."""
    found, waiting = dict[str, Any](), [("#", schema)]
    while waiting:
        pointer, part = waiting.pop()
        found[pointer] = part
        waiting += ((pointer + step, inner) for step, inner in parts_in(part))
    ends = set[str]()
    for _ in range(_MAX_ROUNDS):
        num_known = len(ends)
        for place in reversed(found):  # what is inside a part was found later
            if place not in ends and _ends(found[place], place, ends):
                ends.add(place)
        if "#" in ends or len(ends) == num_known:
            return "#" not in ends
    return False


def _ends(schema: Any, place: str, ends: set[str]) -> bool:
    """Whether a part has a value that ends, as far as it is known which others do."""
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return True
    needed = [unquote(schema["$ref"])] if "$ref" in schema else []
    needed += (f"{place}/allOf/{i}" for i in range(len(schema.get("allOf", ()))))
    if schema.get("type") in ("object", ["object"]):
        properties = schema.get("properties", {})
        needed += (f"{place}/properties/{escaped(name)}" for name in schema.get("required", ()) if name in properties)
    elif schema.get("type") in ("array", ["array"]) and "prefixItems" not in schema and schema.get("minItems"):
        needed += [f"{place}/items"] if "items" in schema else []
    choices = [
        [f"{place}/{keyword}/{i}" for i in range(len(schema[keyword]))]
        for keyword in ("anyOf", "oneOf")
        if keyword in schema
    ]
    return ends.issuperset(needed) and all(any(one in ends for one in some) for some in choices)
