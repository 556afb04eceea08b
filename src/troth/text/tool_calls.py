"""Owns the verdict on proposals: which advertised tool a call names, whether its arguments are a JSON object that
validates, how many calls an answer may have.

Knows no wire format and no stream. A call that fails is described, never repaired. Read next: ``tool_schema.py``
(validation), ``classifier.py`` (what becomes of the verdict).
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, Literal

from troth.contracts.tools import ToolError, ToolPolicy, ToolSpec
from troth.errors import RequestError
from troth.text.tool_formats.coercion import ANY, DuplicateKey, Types, parse_json, types_at
from troth.text.tool_formats.unit import Proposal
from troth.text.tool_schema import ToolSchema

MAX_TOOLS: Final = 256
MAX_PARTS: Final = 16_384
"""Of the schemas of all tools together: some two seconds of reading."""
MAX_CALLS: Final = 64
MAX_ARGUMENT_CHARACTERS: Final = 2**20
MAX_ID_CHARACTERS: Final = 256
_MAX_KEPT_CHARACTERS: Final = 2**16
"""Of a schema that is kept compiled, with ten times its bytes: 1,024 of any size would be a gigabyte."""


class ToolSet:
    """The advertised tools of one request, compiled. Immutable; may serve many answers."""

    def __init__(self, tools: Sequence[ToolSpec], *, strict_keywords: bool = False) -> None:
        """Raises RequestError when there are too many tools, two of one name, or a schema that cannot be used."""
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"{len(tools)} tools; {MAX_TOOLS} are allowed", param="tools")
        self._schemas: dict[str, ToolSchema] = {}
        num_parts = 0
        for place, tool in enumerate(tools):
            if not tool.name:
                raise RequestError("a tool needs a name", param=f"tools[{place}].function.name")
            if tool.name in self._schemas:
                raise RequestError(f"two tools are called {tool.name!r}", param=f"tools[{place}].function.name")
            compiled = self._schemas[tool.name] = _schema_of(tool, place, strict_keywords)
            num_parts += compiled.num_parts
            if num_parts > MAX_PARTS:
                raise RequestError(f"the schemas of the tools have more than {MAX_PARTS} parts together", param="tools")

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def __len__(self) -> int:
        return len(self._schemas)

    @property
    def notices(self) -> dict[str, tuple[str, ...]]:
        """Keywords of each tool's schema that are not checked."""
        return {name: schema.notices for name, schema in self._schemas.items() if schema.notices}

    def types(self, name: str, path: tuple[str, ...]) -> Types:
        """See ``tool_formats.unit.Declarations``."""
        schema = self._schemas.get(name)
        return types_at(schema.schema, path) if schema else ANY

    def fault(self, proposal: Proposal) -> ToolError | None:
        """Why a closed proposal is not a call; None when it is one."""
        name = proposal.name
        schema = self._schemas.get(name)
        if schema is None:
            return ToolError(reason="unknown_tool", message=f"no tool is called {name[:100]!r}", name=name)
        if proposal.fault:
            reason, message = proposal.fault
            return ToolError(reason=reason, message=message, name=name)
        try:
            arguments = parse_json(proposal.arguments)
        except DuplicateKey as error:
            message = f"the key {str(error)[:100]!r} is given twice"
            return ToolError(reason="duplicate_key", message=message, name=name)
        except ValueError as error:
            return ToolError(reason="arguments_not_json", message=f"the arguments are not JSON: {error}", name=name)
        if not isinstance(arguments, dict):
            return ToolError(reason="arguments_not_object", message="the arguments are no JSON object", name=name)
        fault = schema.fault(arguments)
        if fault is None:
            return None
        return ToolError(reason="arguments_invalid", message=fault[1], name=name, pointer=fault[0])


def _schema_of(tool: ToolSpec, place: int, strict_keywords: bool) -> ToolSchema:
    param = f"tools[{place}].function.parameters"
    try:
        compiled = _compiled(True if tool.parameters is None else tool.parameters, param, strict_keywords)
        compiled.require_objects()
    except RequestError as error:
        raise RequestError(f"{param} of {json.dumps(tool.name[:64])}: {error}", param=param, code=error.code) from None
    return compiled


def _compiled(schema: Any, param: str, strict_keywords: bool) -> ToolSchema:
    """A schema compiled, or found compiled: agents send the same tools with every turn, and one takes milliseconds."""
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        return ToolSchema(schema, param=param, strict_keywords=strict_keywords)
    if len(text) > _MAX_KEPT_CHARACTERS:
        return ToolSchema(schema, param=param, strict_keywords=strict_keywords)
    return _from_text(text, param, strict_keywords)


@lru_cache(maxsize=MAX_TOOLS * 4)
def _from_text(text: str, param: str, strict_keywords: bool) -> ToolSchema:
    return ToolSchema(json.loads(text), param=param, strict_keywords=strict_keywords)


def offered(policy: ToolPolicy) -> tuple[ToolSpec, ...]:
    """The tools a request lets the model call. Raises RequestError when the choice names one that is not there."""
    if policy.choice.mode == "none":
        return ()
    if policy.choice.mode != "named":
        return policy.tools
    chosen = tuple(tool for tool in policy.tools if tool.name == policy.choice.name)
    if not chosen:
        raise RequestError(
            f"tool_choice names {policy.choice.name!r}, which is not among the tools", param="tool_choice"
        )
    return chosen


def new_id(style: Literal["call", "nine"]) -> str:
    """An id no other call has. ``nine``: letters and digits, as Mistral's templates insist."""
    if style == "nine":
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
