"""The schemas inside a grammar, by the fields that they came from, so that a fault can be told by tool and pointer.

The grammar of calls says in comments whose arguments its rules are. Refuses to compile. Read next: ``grammar.py``
(compiles, and asks which part is at fault), ``call_pattern.py`` (writes the comments).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from troth.contracts.grammar import Grammar
from troth.errors import RequestError
from troth.text.grammar_lark import LOOSE
from troth.text.grammar_schema import AnswerSchema

_MAX_NAME_CHARACTERS: Final = 64
_COMMENT: Final = re.compile(
    r'^// (tools\[\d+\]\.function\.parameters)( of "(?:\\.|[^"\\])*")(?:: (.*))?$', re.MULTILINE
)
_ONE_OF: Final = "oneOf constraints are not supported"
"""In the compiler's words: parts of a strict one may match the same value."""
_NO_VALUE: Final = "Unsatisfiable schema"
_INLINE: Final = "%json "


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """One schema inside a grammar."""

    schema: AnswerSchema
    param: str
    """The field it came from."""
    where: str = ""
    """Whose it is, behind the field in a message."""
    strict: bool = False
    is_notated: bool = False
    """It stands in the grammar as rules of its own, not as JSON."""

    def refusal(self, pointer: str, message: str) -> RequestError:
        """The error for something in it."""
        place = f" at {pointer[:300]}" if pointer else ""
        return RequestError(f"{self.param}{self.where}{place}: {message}", param=self.param, code="invalid_schema")

    def fault(self, fault: Callable[[Any, bool], str | None]) -> RequestError | None:
        """The error for what cannot be compiled in it; None: it can.

        Args:
            fault: Why a schema, strict or not, does not compile, or None.
        """
        if fault(self.schema.schema, self.strict) is None:
            return None
        pointer, message = self.schema.fault_at(lambda schema: fault(schema, self.strict))
        if _ONE_OF in (message or ""):
            return RequestError(
                f"{self.param}{self.where} at {pointer[:300]}/oneOf: that no second part matches cannot be enforced "
                "while generating; write anyOf, or set strict to false",
                param=self.param,
                code="unsupported_schema",
            )
        return self.refusal(pointer, f"cannot be compiled: {message}")

    def contradiction(self, fault: Callable[[Any, bool], str | None]) -> RequestError | None:
        """The error for what no value can match, which rules of its own do not show; None: there is nothing like it."""
        said = fault(self.schema.schema, self.strict) if self.is_notated else None
        return self.fault(fault) if said is not None and said.startswith(_NO_VALUE) else None


def tool_field(place: int) -> str:
    """The field of a tool's schema."""
    return f"tools[{place}].function.parameters"


def tool_where(name: str) -> str:
    """Whose schema it is, behind the field in a message."""
    return f" of {json.dumps(name[:_MAX_NAME_CHARACTERS])}"


def tool_comment(place: int, name: str, schema: Any = None) -> str:
    """The line before the rules of a tool's calls. Where its schema stands in them as it is, it need not be given."""
    shown = f": {json.dumps(schema)}" if schema is not None else ""
    return f"// {tool_field(place)}{tool_where(name)}{shown}"


def parts_of(grammar: Grammar, schema: AnswerSchema | None, param: str) -> Iterator[GrammarPart]:
    """The schemas in a grammar: its own, which was read, and those of tools."""
    if schema is not None:
        yield GrammarPart(schema, param, strict=grammar.strict)
    for source in (grammar.source if grammar.kind == "calls" else "", grammar.frame):
        for found in _COMMENT.finditer(source):
            text, begin = (found[3], 0) if found[3] else (source, source.find(_INLINE, found.end()))
            if begin >= 0:
                value, _ = json.JSONDecoder().raw_decode(text, begin if found[3] else begin + len(_INLINE))
                loose = isinstance(value, dict) and value.pop(LOOSE, False)
                yield GrammarPart(AnswerSchema(value), found[1], found[2], strict=not loose, is_notated=bool(found[3]))
