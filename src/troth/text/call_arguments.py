"""Owns the grammar of one call's arguments in a notation that is no JSON object, from behind the tool's name on.

A text that stands as it is ends at the first mark that ends it; any other value is a literal. What the grammar accepts,
the format's reader reads back as arguments that the schema allows. Refuses to know what stands around calls. Read next:
``tool_formats/notation.py`` (the words), ``call_values.py`` (literals), ``call_pattern.py`` (asks).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from troth.errors import RequestError
from troth.text.call_schema import Alternative, SchemaParts
from troth.text.call_values import ANY_KEY, MAX_FREE_ORDER, ValueRules, bounded_text, declared_members
from troth.text.lark_words import ANYTHING, LarkRules, PatternTokens, all_of, lark_words, quoted
from troth.text.text_pattern import only_bound_above, plain
from troth.text.tool_formats.coercion import ANY, ITEM, Types, json_text, parse_json, types_at
from troth.text.tool_formats.notation import CALL_ID, INDEX, ITEM_KEY, KEY, KIND, ArgumentNotation
from troth.text.tool_formats.unit import MAX_KEY_CHARACTERS

_SPACE: Final = r"[\s\x1C-\x1F]*"
_LOOKS_LIKE: Final = {
    "null": f"{_SPACE}(null|[nN][oO][nN][eE]){_SPACE}",
    "boolean": f"{_SPACE}([tT][rR][uU][eE]|[fF][aA][lL][sS][eE]){_SPACE}",
    "number": f"{_SPACE}-?[0-9](.|\\n)*",
    "array": f"{_SPACE}\\[(.|\\n)*",
    "object": f"{_SPACE}\\{{(.|\\n)*",
}
"""Texts that may be read as a value of each type, and more."""
_PRINTED: Final = {"boolean": '("true" | "True" | "false" | "False")', "null": '("null" | "None")'}
"""Values that templates print as Python does, where no text can be meant."""
_PLACES: Final = {INDEX: "/0|[1-9][0-9]?/", CALL_ID: r"/[A-Za-z0-9_\-]{1,32}/"}
_PIECES: Final = re.compile(f"([\n{INDEX}{CALL_ID}])")
_SEVERAL: Final = ("anyOf", "oneOf", "allOf")
"""Keywords that can make an object several ones."""
_EXACT_PIECES: Final = re.compile(f"([{INDEX}{CALL_ID}])")


def spelled(words: str, tokens: PatternTokens, *, exact: bool = False) -> str:
    """Words in which numbers and ids have their places; a new line may be left out, unless they are ``exact``."""
    pieces = _EXACT_PIECES if exact else _PIECES
    places = _PLACES if exact else {**_PLACES, "\n": '"\\n"?'}
    return " ".join(places.get(piece) or lark_words(piece, tokens) for piece in pieces.split(words) if piece)


class ArgumentRules:
    """The arguments of one tool.

    Args:
        notation: How they are written.
        schema: Of the arguments, an object's, as ``grammar_schema.read_schema`` read it.
        strict: What cannot be written is refused; False: left out, for validation to judge.
        rules: Where the rules go.
        refusal: The error for a keyword that cannot be written, and its pointer.
    """

    def __init__(
        self,
        notation: ArgumentNotation,
        schema: Any,
        rules: LarkRules,
        *,
        strict: bool,
        refusal: Callable[[str, str], RequestError],
    ) -> None:
        self._notation = notation
        self._schema = schema
        self._strict = strict
        self._rules = rules
        self._parts = SchemaParts(schema, strict=strict, refusal=refusal)
        self._values = ValueRules(notation.literals, self._parts, rules, avoid=notation.end)
        self._known: dict[str, str | None] = {}
        self._pad = '"\\n"?' if notation.padded else ""

    def call(self, *, free: bool = False) -> str | None:
        """A call from behind the tool's name to its end; None: no arguments are valid.

        Parameters come in any order while they are few. Others than the schema's are left out, unless it names none
        and does not forbid them.

        Args:
            free: Any arguments, whatever the schema says, where the notation has rules of them.
        """
        notation = self._notation
        named: list[tuple[str, Any, bool]] = []
        # No rule can say that two keys are the same.
        is_open = free = free and KEY not in notation.behind
        if not free:
            objects = [bounds for kind, bounds in self._parts.alternatives(self._schema) if kind == "object"]
            if not objects:
                return None
            if len(objects) > 1 or "enum" in objects[0]:
                own = self._schema if isinstance(self._schema, dict) else {}
                keyword = "enum" if len(objects) == 1 else next((one for one in _SEVERAL if one in own), "$ref")
                self._parts.leaves_out(keyword, own.get(keyword))
                objects = [{key: own[key] for key in ("properties", "required") if key in own}]
            named = declared_members(objects[0], sort=notation.literals.sorted_keys)
            is_open = not named and not self._strict and objects[0].get("additionalProperties", True) is not False
            is_open = is_open and KEY not in notation.behind
        members = self._free() if is_open else self._members(named)
        if members is None:
            return None
        return f"{spelled(notation.open, self._rules.tokens)} {members} {spelled(notation.close, self._rules.tokens)}"

    def _members(self, named: Sequence[tuple[str, Any, bool]], path: tuple[str, ...] = ()) -> str | None:
        """These arguments; None where one that is required can have no value."""
        members = []
        for key, schema, required in named:
            can_be = len(key) <= MAX_KEY_CHARACTERS and key.isprintable() and re.fullmatch(self._notation.keys, key)
            argument = self._argument(key, schema, (*path, key)) if can_be else None
            if argument is not None:
                members.append((argument, required))
            elif required:
                return None
        return self._values.members(members, self._separator)

    @property
    def _separator(self) -> str:
        mark = self._notation.separator
        return " ".join([quoted(mark.strip()), *(['" "?'] if mark.strip() != mark else [])]) if mark else ""

    def _argument(self, key: str | None, schema: Any, path: tuple[str, ...] = ()) -> str | None:
        """The rule of an argument, from before its key to behind its value; None: it can have no value.

        Args:
            key: None: any.
            schema: Of the value.
            path: Leads to the value, in the words of ``types_at``.
        """
        types = types_at(self._schema, path) if path else ANY
        known = json.dumps([key, schema, sorted(types)], sort_keys=True)
        if known not in self._known:
            name = self._known[known] = self._rules.reserve()
            ways = self._ways(key, schema, types, path)
            if ways:
                self._rules.define(name, " | ".join(ways))
            else:
                self._known[known] = None
        return self._known[known]

    def _ways(self, key: str | None, schema: Any, types: Types, path: tuple[str, ...]) -> list[str]:
        """The ways to write an argument whose value is read as one of ``types``."""
        notation = self._notation
        takes_texts, is_open = notation.before_text is not None, self._parts.is_open(schema)
        name = self._key(key)
        behind = spelled(notation.behind.replace(KEY, key or ""), self._rules.tokens)
        ways: list[str] = []

        def may_be(before: str | None, value: str | None) -> None:
            if value is not None:
                ways.append(f"{name} {spelled(before or '', self._rules.tokens)} {value} {behind}")

        if takes_texts and is_open:
            may_be(notation.before_text, self._free_text(ANYTHING, short=not notation.never_first))
        for kind, bounds in self._parts.alternatives(schema):
            if takes_texts and (kind == "string" or (is_open and not notation.tells_texts)):
                may_be(notation.before_text, None if is_open else self._text(bounds, types))
                continue
            before = notation.before_value.replace(KIND, "number" if kind == "integer" else kind)
            value = self._literal((kind, bounds), types, path)
            end = self._rules.words(notation.end)
            may_be(before, None if value is None else f"{self._pad} {value} {self._pad} {end}")
        return ways

    def _literal(self, alternative: Alternative, types: Types, path: tuple[str, ...]) -> str | None:
        """A value that is no text standing by itself, as the reader takes it where one of ``types`` belongs."""
        notation, kind = self._notation, alternative[0]
        value = self._values.literal(alternative)
        if notation.nests:
            inner = self._elements(alternative, types, path)
            value = f"({' | '.join(filter(None, [inner, value]))})" if inner else value
        if value is None:
            return None
        if (
            "string" in types
            or notation.tells_texts
            or not (notation.before_text is not None or notation.quoted_values)
        ):
            return value
        if "enum" not in alternative[1] and kind in _PRINTED:
            value = _PRINTED[kind]
        if notation.quoted_values and kind not in ("array", "object"):
            mark = self._rules.words(notation.literals.quotes[0].mark)
            return f"({value} | {mark} {value} {mark})"
        return value

    def _elements(self, alternative: Alternative, types: Types, path: tuple[str, ...]) -> str | None:
        """An object or array of arguments like the one it is in, at least one; None: it can only be a literal."""
        kind, bounds = alternative
        if kind == "array" and not bounds.keys() & {"enum", "prefixItems"} and bounds.get("maxItems") != 0:
            item = self._argument(ITEM_KEY, bounds.get("items", True), (*path, ITEM))
            return f"{item}{{{max(1, bounds.get('minItems', 0))},{bounds.get('maxItems', '')}}}" if item else None
        if kind != "object" or "enum" in bounds:
            return None
        named = declared_members(bounds)
        needed = any(required for *_, required in named)
        if not named or (len(named) > MAX_FREE_ORDER and not needed):
            return None  # whether there is any could not be told
        if "array" in types and ITEM_KEY in (key for key, *_ in named):
            return None
        members = self._members(named, path)
        return members.removesuffix("?") if members else None

    def _text(self, bounds: dict[str, Any], types: Types) -> str | None:
        """A text as it stands, with the mark that ends it; it is read as a text though it may be of another type."""
        notation = self._notation
        if "enum" in bounds:
            texts = [text for text in bounds["enum"] if self._reads_as(text, types)]
            if notation.padded:
                texts = [*(f"\n{text}\n" for text in texts), *(text for text in texts if not text.startswith("\n"))]
            return self._rules.one_of(texts, notation.end) if texts else None
        patterns = bounded_text(bounds, self._parts)
        others = set() if notation.tells_texts else {"number" if kind == "integer" else kind for kind in types}
        alike = "".join(f" & ~/{_LOOKS_LIKE[kind]}/" for kind in sorted(others - {"string"}))
        short = only_bound_above(patterns) and not alike and not notation.never_first
        if short and patterns and notation.padded:
            return self._free_text(f"/{patterns[0]}|\\n{patterns[0]}\\n/", short=True)
        if not patterns or not notation.padded:
            return self._free_text(f"{all_of(patterns)}{alike}", short=short)
        text = self._rules.terminal(f"{all_of(patterns)}{alike}")
        plain_text = self._rules.terminal(f"{text} & ~/\\n(.|\\n)*/")
        return self._free_text(self._rules.terminal(f'{plain_text} | "\\n" {text} "\\n"'))

    def _reads_as(self, text: str, types: Types) -> bool:
        """Whether a text of an enum is read as itself."""
        notation = self._notation
        if notation.end in text or (notation.never_first and text.startswith(notation.never_first)):
            return False
        return notation.tells_texts or bool(parse_json(json_text(text, types)) == text)

    def _free_text(self, body: str, *, short: bool = False) -> str:
        """A text of a terminal's definition; ``short`` as ``stops_anywhere`` of ``LarkRules.until``."""
        never = self._notation.never_first
        first = f" & ~/{plain(never)}(.|\\n)*/" if never else ""
        return self._rules.until(f"{body}{first}", self._notation.end, stops_anywhere=short)

    def _key(self, key: str | None) -> str:
        if key is not None:
            return self._rules.words(self._notation.before_key + key)
        return f"{self._rules.words(self._notation.before_key)} {self._rules.terminal(ANY_KEY)}"

    def _free(self) -> str:
        """Any arguments at all."""
        member = self._argument(None, True)
        return f"({member} ({self._separator} {member})*)?"
