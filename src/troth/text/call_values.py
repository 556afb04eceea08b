"""Owns the grammar of values that stand as literals in a call: what a schema allows, spelled in one notation.

Everything it accepts is read back as that value. Refuses to know how arguments stand in a call. Read next:
``call_schema.py`` (the alternatives), ``tool_formats/notation.py`` (the notation), ``call_arguments.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any, Final

from troth.text.call_schema import Alternative, SchemaParts
from troth.text.lark_words import LarkRules, all_of, quoted
from troth.text.text_pattern import NoPattern, only_bound_above, plain, text_patterns
from troth.text.tool_formats.notation import Literals, Quote

ANY_KEY: Final = r"/[A-Za-z_][A-Za-z0-9_\-]{0,63}/"
"""Keys that no schema names, where they stand without quotes."""
MAX_FREE_ORDER: Final = 4
"""Members of one object that may come in any order; more come as they are declared, for every set is a rule."""


class ValueRules:
    """The values of one schema.

    Args:
        literals: How they are written.
        parts: Of the schema.
        rules: Where the rules go.
        avoid: Text that no value may hold, as it would end the value; empty: none.
    """

    def __init__(self, literals: Literals, parts: SchemaParts, rules: LarkRules, avoid: str = "") -> None:
        self._literals = literals
        self._parts = parts
        self._rules = rules
        self._avoid = avoid
        self._known: dict[str, str | None] = {}
        self._space = ' " "?' if literals.space else ""

    def value(self, schema: Any) -> str | None:
        """The rule of a schema's values; None: there are none. Raises RequestError."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            name = self._known[key] = self._rules.reserve()
            alternatives = [self.literal(one) for one in self._parts.alternatives(schema)]
            bodies = [body for body in alternatives if body is not None]
            if bodies:
                self._rules.define(name, " | ".join(bodies))
            else:
                self._known[key] = None
        return self._known[key]

    def literal(self, alternative: Alternative) -> str | None:
        """The values of one alternative; None: none can be written."""
        kind, bounds = alternative
        words = self._literals
        if "enum" in bounds:
            return self._constants(bounds["enum"])
        if kind == "null":
            return _any_of(words.null)
        if kind == "boolean":
            return _any_of((*words.true, *words.false))
        if kind == "string":
            return self._text(bounds)
        if kind == "array":
            return self._array(bounds)
        if kind == "object":
            return self._object(bounds)
        return f"%json {json.dumps({'type': kind, **bounds})}"

    def members(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Members of an object, each at most once, those that are required (the flag) at least once."""
        if len(members) > MAX_FREE_ORDER:
            return self._declared_order(members, separator)
        sets = [
            frozenset(some) for size in range(len(members), -1, -1) for some in combinations(range(len(members)), size)
        ]
        bodies: dict[frozenset[int], str] = {}
        for held in sets:
            before = f"{separator} " if held and separator else ""
            ways = [
                f"{before}{member} {bodies[held | {place}]}".strip()
                for place, (member, _) in enumerate(members)
                if place not in held
            ]
            may_end = all(place in held for place, (_, required) in enumerate(members) if required)
            body = " | ".join(ways)
            bodies[held] = f"{self._rules.rule(body)}{'?' if may_end else ''}" if body else ""
        return bodies[frozenset()]

    def _declared_order(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """As declared: two rules a member, with none before it and with some, as something may stand between them."""
        some = none = ""
        for member, required in reversed(members):
            follows = f"{separator} {member} {some}".strip()
            begins = f"{member} {some}".strip()
            none = self._rules.rule(begins if required else f"{begins} | {none}" if none else f"({begins})?")
            some = self._rules.rule(follows if required else f"{follows} | {some}" if some else f"({follows})?")
        return none

    def _constants(self, values: Sequence[Any]) -> str | None:
        """These values exactly."""
        texts = {text for value in values for text in self._literals.written(value)}
        return _grouped([self._rules.words(text) for text in sorted(texts) if not self._holds_mark(text)])

    def _key(self, key: str) -> list[str]:
        """A key of an object in the ways it can be written."""
        return [text for text in self._literals.written_key(key) if not self._holds_mark(text)]

    def _text(self, bounds: dict[str, Any]) -> str | None:
        patterns = bounded_text(bounds, self._parts)
        return _grouped([self._quoted_text(quote, patterns) for quote in self._literals.quotes])

    def _quoted_text(self, quote: Quote, patterns: Sequence[str]) -> str:
        if not quote.escapes:
            short = only_bound_above(patterns)
            text = self._rules.until(all_of(patterns), quote.mark, stops_anywhere=short)
            return f"{self._rules.words(quote.mark)} {text}"
        # What is bound has no escapes: a pattern is of characters, not of how they are written.
        body = self._characters(quote, "" if patterns else quote.escapes)
        text = self._rules.terminal(all_of((body, *patterns)))
        return self._rules.terminal(f"{quoted(quote.mark)} {text} {quoted(quote.mark)}")

    def _characters(self, quote: Quote, escapes: str) -> str:
        """What stands between quotes, as a regular expression: never the first two characters of what ends a value,
        side by side; the second can be escaped, and a longer match would cost the compiler far more."""
        never = plain(quote.mark) + (r"\\" if quote.controls else r"\\\x00-\x1F")
        escaped = f"|{escapes}" if escapes else ""
        if not self._avoid:
            return f"([^{never}]{escaped})*"
        first, second = map(plain, self._avoid[:2])
        return f"([^{never}{first}]{escaped}|{first}+([^{never}{first}{second}]{escaped}))*{first}*"

    def _array(self, bounds: dict[str, Any]) -> str | None:
        first = [self.value(part) for part in bounds.get("prefixItems", ())]
        item = self.value(bounds.get("items", True))
        least, most = int(bounds.get("minItems", 0)), bounds.get("maxItems")
        longest = len(first) if item is None else most
        longest = next((place for place, one in enumerate(first) if one is None), longest)
        if most is not None:
            longest = most if longest is None else min(int(most), longest)
        if longest is not None and longest < least:
            return None
        more = f'"," {self._space.strip()}'.strip()
        first = first[:longest]
        rest = ""
        if item is not None and (longest is None or longest > len(first)):
            fewest = max(0, least - len(first))
            rest = f"({more} {item}){{{fewest},{'' if longest is None else int(longest) - len(first)}}}"
            if not first:
                rest = f"({more} {item}){{{max(0, fewest - 1)},{'' if longest is None else int(longest) - 1}}}"
                rest = f"{item} {rest}" if longest != 1 else item
                rest = rest if least else f"({rest})?"
        for place in range(len(first) - 1, -1, -1):
            here = f"{more} {first[place]} {rest}" if place else f"{first[place]} {rest}"
            rest = here if place < least else f"({here})?"
        return f'"[" {rest} "]"'

    def _object(self, bounds: dict[str, Any]) -> str | None:
        more = f'"," {self._space.strip()}'.strip()
        colon = f'":" {self._space.strip()}'.strip()
        named = declared_members(bounds, sort=self._literals.sorted_keys)
        if named:
            members = []
            for key, schema, required in named:
                value, keys = self.value(schema), self._key(key)
                if value is not None and keys:
                    members.append((f"{_grouped([self._rules.words(one) for one in keys])} {colon} {value}", required))
                elif required:
                    return None
            return f'"{{" {self.members(members, more)} "}}"'
        extra = bounds.get("additionalProperties", True)
        value = None if extra is False else self.value(extra)
        if value is None:
            return '"{" "}"'
        key = self._any_key()
        return f'"{{" ({key} {colon} {value} ({more} {key} {colon} {value})*)? "}}"'

    def _any_key(self) -> str:
        if self._literals.bare_keys:
            return self._rules.terminal(ANY_KEY)
        found = _grouped([self._quoted_text(quote, []) for quote in self._literals.quotes])
        assert found is not None, self._literals
        return found

    def _holds_mark(self, text: str) -> bool:
        return bool(self._avoid) and self._avoid in text


def declared_members(bounds: dict[str, Any], *, sort: bool = False) -> list[tuple[str, Any, bool]]:
    """Key, schema and whether it is required, of the members that a schema names, in its order."""
    properties = dict(bounds.get("properties", {}))
    required = bounds.get("required", [])
    for key in required:
        properties.setdefault(key, bounds.get("additionalProperties", True))
    keys = sorted(properties, key=str.lower) if sort else properties
    return [(key, properties[key], key in required) for key in keys]


def bounded_text(bounds: dict[str, Any], parts: SchemaParts) -> list[str]:
    """What a text matches, as regular expressions; what cannot be written is left out. Raises RequestError."""
    kept = dict(bounds)
    while True:
        try:
            return text_patterns(kept)
        except NoPattern as error:
            keyword, *pattern = error.args
            if pattern:
                parts.leaves_out_pattern(pattern[0])
                kept["patterns"] = [one for one in kept["patterns"] if one != pattern[0]]
            else:
                parts.leaves_out(keyword, kept.pop(keyword))


def _any_of(words: Sequence[str]) -> str | None:
    return _grouped([quoted(word) for word in words])


def _grouped(ways: Sequence[str]) -> str | None:
    if len(ways) < 2:
        return ways[0] if ways else None
    return f"({' | '.join(ways)})"
