"""What the answer must match, from the fields of a body: response_format, and the extensions other servers know.

Refuses to know tokens and how grammars are compiled. Read next: ``text/response_format.py``, ``generation.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from troth.contracts.bounds import mistyped_json
from troth.contracts.grammar import Grammar, GrammarKind
from troth.errors import CapabilityUnavailable, RequestError
from troth.serve.fields import Fields
from troth.text.response_format import grammar_from, read_response_format, schema_grammar

if TYPE_CHECKING:
    from troth.serve.reply import Generation


@dataclass(frozen=True, slots=True)
class Wanted:
    """A grammar, and the field it came from."""

    grammar: Grammar
    param: str


def read_grammar(fields: Fields) -> Wanted | None:
    """The grammar a body asks for; None: any text. Raises RequestError, also for two of them."""
    given = [
        wanted
        for wanted in (_response_format(fields), *_structured_outputs(fields), *_guided(fields, "guided_"))
        if wanted is not None
    ]
    if len(given) > 1:
        names = [wanted.param.partition(".json_schema")[0] for wanted in given]
        raise RequestError(f"{' and '.join(names)} both say what the answer must match; send one", param=names[1])
    return given[0] if given else None


def require_compiled(generation: Generation) -> Generation:
    """The generation, if its grammar can be followed, with what of it cannot be enforced. Takes up to seconds.

    Raises:
        RequestError: it cannot be compiled.
        CapabilityUnavailable: this model follows no grammar.
    """
    wanted = generation.wishes.grammar
    assert wanted is not None, "called for generations with a grammar"
    if generation.model.grammars is None:
        raise CapabilityUnavailable("a grammar", "this model has no compiler for it", param=wanted.param)
    compiled = generation.model.grammars.compile(
        wanted.grammar, continues_text=generation.requests[0].continues_text, param=wanted.param
    )
    return replace(generation, not_enforced=(*generation.not_enforced, *compiled.not_enforced))


def _response_format(fields: Fields) -> Wanted | None:
    value = fields.object("response_format")
    grammar = read_response_format(dict(value.items())) if value else None
    if grammar is None:
        return None
    return Wanted(grammar, "response_format.json_schema.schema" if grammar.source else "response_format")


def _structured_outputs(fields: Fields) -> list[Wanted | None]:
    inner = fields.object("structured_outputs")
    if inner is None:
        return []
    given = _guided(inner, "")
    if inner.flag("json_object"):
        given.append(Wanted(Grammar(kind="json_object"), inner.name("json_object")))
    if unknown := inner.unknown():
        name = unknown[0]
        raise RequestError(f"{name} is not supported. Leave it out.", param=name, code="unsupported_parameter")
    return given


def _guided(fields: Fields, prefix: str) -> list[Wanted | None]:
    """Fields of the same meaning under their older and newer names."""
    return [
        _schema(fields, f"{prefix}json"),
        _text(fields, f"{prefix}regex", "regex"),
        _choice(fields, f"{prefix}choice"),
        _text(fields, f"{prefix}grammar", "lark"),
    ]


def _schema(fields: Fields, field: str) -> Wanted | None:
    value, param = fields.raw(field), fields.name(field)
    if value is None:
        return None
    if isinstance(value, str):
        return Wanted(grammar_from(param, kind="json_schema", source=value), param)
    if not isinstance(value, dict | bool):
        raise mistyped_json(param, "a schema, or its JSON text", value)
    return Wanted(schema_grammar(value, strict=False, param=param), param)


def _text(fields: Fields, field: str, kind: GrammarKind) -> Wanted | None:
    value, param = fields.text(field), fields.name(field)
    return None if value is None else Wanted(grammar_from(param, kind=kind, source=value), param)


def _choice(fields: Fields, field: str) -> Wanted | None:
    values, param = fields.array(field), fields.name(field)
    if values is None:
        return None
    if other := [value for value in values if not isinstance(value, str)]:
        raise mistyped_json(param, "an array of strings", other[0])
    return Wanted(grammar_from(param, kind="choice", choices=tuple(values)), param)
