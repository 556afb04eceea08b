"""Reads what a chat request says about tools, in the form of the public OpenAI API reference, into a policy.

Compiles no schema and knows no wire format. Read next: ``contracts/tools.py`` (what comes out), ``chat_terms.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from troth.contracts.bounds import mistyped_json, shown_json
from troth.contracts.tools import ToolChoice, ToolPolicy, ToolSpec, ToolValidation
from troth.errors import RequestError
from troth.text.tokenizer import require_unicode

MAX_NAME_CHARACTERS: Final = 256
_MODES: Final = ("auto", "none", "required")
_LOWEST, _HIGHEST = -(2**63), 2**64 - 1


def read_policy(
    tools: object, choice: object = None, *, parallel: bool = True, validation: str | None = None, eager: bool = False
) -> ToolPolicy:
    """The policy of one request.

    Args:
        tools: A list of ``{"type": "function", "function": {...}}``, or of the functions alone; None is none.
        choice: ``auto``, ``none``, ``required``, or an object that names one function; None is ``auto``.
        parallel: Whether one answer may have several calls.
        validation: ``strict`` or ``forward``; None is ``strict``.
        eager: Pass arguments on while their call is open, where validation is ``forward``.

    Raises:
        RequestError: a value of the wrong form; ``param`` names its place.
    """
    if validation is not None and validation not in get_args(ToolValidation):
        raise RequestError(
            f"tool_validation must be strict or forward, not {shown_json(validation)}", param="tool_validation"
        )
    specs = _specs(tools)
    forwards = validation == "forward"
    return ToolPolicy(
        tools=specs,
        choice=_choice(choice, specs),
        validation="forward" if forwards else "strict",
        parallel=parallel,
        eager=eager and forwards,
    )


def _specs(tools: object) -> tuple[ToolSpec, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise mistyped_json("tools", "an array of tools", tools)
    return tuple(_spec(tool, f"tools[{place}]") for place, tool in enumerate(tools))


def _spec(tool: object, place: str) -> ToolSpec:
    if not isinstance(tool, Mapping):
        raise mistyped_json(place, "an object", tool)
    kind = tool.get("type", "function")
    if kind != "function":
        raise RequestError(
            f"{place}.type is {shown_json(kind)}; only functions can be called here",
            param=f"{place}.type",
            code="unsupported_parameter",
        )
    function, where = (tool["function"], f"{place}.function") if "function" in tool else (tool, place)
    if not isinstance(function, Mapping):
        raise mistyped_json(where, "an object", function)
    name = function.get("name")
    if not isinstance(name, str):
        raise mistyped_json(f"{where}.name", "a string", name)
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        raise RequestError(
            f"{where}.name must have 1 to {MAX_NAME_CHARACTERS} characters, not {len(name)}", param=f"{where}.name"
        )
    require_unicode(name, f"{where}.name")
    description, strict = function.get("description") or "", function.get("strict") or False
    if not isinstance(description, str):
        raise mistyped_json(f"{where}.description", "a string", description)
    if not isinstance(strict, bool):
        raise mistyped_json(f"{where}.strict", "true or false", strict)
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | bool | None):
        raise mistyped_json(f"{where}.parameters", "a JSON schema", parameters)
    _require_64_bits(parameters, f"{where}.parameters")
    return ToolSpec(name=name, parameters=parameters, description=description, strict=strict)


def _require_64_bits(schema: object, place: str) -> None:
    """Refuse integers that no engine in another process could be told."""
    waiting: list[Any] = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, int) and not _LOWEST <= value <= _HIGHEST:
            raise RequestError(f"{place} holds the integer {shown_json(value)}; 64 bits are read here", param=place)


def _choice(choice: object, specs: tuple[ToolSpec, ...]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        if choice not in _MODES:
            raise RequestError(
                f"tool_choice must be {', '.join(_MODES)} or an object that names a function, not {shown_json(choice)}",
                param="tool_choice",
            )
        if choice == "required" and not specs:
            raise RequestError("tool_choice is required, but there are no tools", param="tool_choice")
        return ToolChoice(mode=choice)  # type: ignore[arg-type]
    if not isinstance(choice, Mapping):
        raise mistyped_json("tool_choice", "a string or an object", choice)
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise RequestError(
            'tool_choice must be like {"type": "function", "function": {"name": "..."}}', param="tool_choice"
        )
    if name not in {spec.name for spec in specs}:
        raise RequestError(f"tool_choice names {shown_json(name)}, which is not among the tools", param="tool_choice")
    return ToolChoice(mode="named", name=name)
