"""Writes past calls in a wire format, for templates that declare tools and write no calls: they stand in the content.

Only formats that such templates were seen to teach are here; what is written is what the format reads back. Knows no
template. Read next: ``message_form.py`` (puts it into messages), ``probe_tools.py`` (proves that it arrives).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from troth.contracts.tools import CallForm

Written = tuple[str, Any]
"""Name and arguments of a past call; arguments that are no object are its text."""


def write_calls(name: str, calls: Sequence[Written], form: CallForm | None = None) -> str:
    """The calls as a model of this format writes them.

    Args:
        name: Of the format; one of ``WRITERS``, or ``declared`` with its ``form``.
        calls: In order, at least one.
    """
    if form is not None:
        return "\n".join(f"{form.opens[0]}\n{_object(call)}\n{form.closes[0]}" for call in calls)
    return WRITERS[name](calls)


def _object(call: Written, names: tuple[str, str] = ("name", "arguments")) -> str:
    return json.dumps(dict(zip(names, call, strict=True)), ensure_ascii=False)


def _array(before: str, after: str = "", names: tuple[str, str] = ("name", "arguments")) -> Callable[..., str]:
    return lambda calls: f"{before}[{', '.join(_object(call, names) for call in calls)}]{after}"


def _each(before: str, after: str, between: str = "\n") -> Callable[..., str]:
    return lambda calls: between.join(f"{before}{_object(call)}{after}" for call in calls)


def _python(before: str, after: str) -> Callable[..., str]:
    return lambda calls: f"{before}[{', '.join(map(_python_call, calls))}]{after}"


def _python_call(call: Written) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in _members(arguments))})"


def _members(arguments: Any) -> list[tuple[str, Any]]:
    return list(arguments.items()) if isinstance(arguments, Mapping) else [("arguments", arguments)]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _pairs(calls: Sequence[Written]) -> str:
    def one(call: Written) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{_as_text(value)}</arg_value>\n" for key, value in _members(call[1])
        )
        return f"<tool_call>{call[0]}\n{''.join(pairs)}</tool_call>"

    return "\n".join(map(one, calls))


def _tags(calls: Sequence[Written]) -> str:
    def one(call: Written) -> str:
        tags = (f"<parameter={key}>\n{_as_text(value)}\n</parameter>\n" for key, value in _members(call[1]))
        return f"<tool_call>\n<function={call[0]}>\n{''.join(tags)}</function>\n</tool_call>"

    return "\n".join(map(one, calls))


WRITERS: Final[Mapping[str, Callable[[Sequence[Written]], str]]] = MappingProxyType(
    {
        "hermes": _each("<tool_call>\n", "\n</tool_call>"),
        "function_tags": _tags,
        "argument_pairs": _pairs,
        "granite": _array("<|tool_call|>"),
        "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
        "pythonic": _python("", ""),
        "json_list": _array(""),
        "functools": _array("functools"),
        "tool_calls_array": _array("<tool_calls>", "</tool_calls>"),
        "nemotron2": _array("<TOOLCALL>", "</TOOLCALL>"),
        "command_r": _array("Action:\n```json\n", "\n```", ("tool_name", "parameters")),
    }
)
"""Format -> what writes its calls."""
