"""Writes past calls in a wire format, for templates that declare tools and write no calls: they stand in the content.

What is written is what the format reads back, save a text that holds the mark which ends it. Knows no template. Read
next: ``message_form.py`` (puts it into messages), ``probe_tools.py`` (proves that it arrives).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from troth.contracts.tools import CallForm
from troth.text.tool_formats import FORMATS, element_calls
from troth.text.tool_formats.coercion import type_names
from troth.text.tool_formats.notation import INDEX, KEY, KIND, ArgumentNotation

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


def _named(before: str, between: str, after: str = "", section: tuple[str, str] = ("", "")) -> Callable[..., str]:
    """Names in the open, each with its object."""

    def write(calls: Sequence[Written]) -> str:
        parts = (
            f"{before}{name}{between}{json.dumps(arguments, ensure_ascii=False)}{after}".replace(INDEX, str(place))
            for place, (name, arguments) in enumerate(calls)
        )
        return f"{section[0]}{''.join(parts)}{section[1]}"

    return write


def _notated(
    name: str, before: str, after: str = "", between: str = "", section: tuple[str, str] = ("", "")
) -> Callable[..., str]:
    """Calls in the notation of a format.

    Args:
        name: Of the format.
        before: The words before a call's name.
        after: The words behind a call.
        between: Two calls.
        section: Around all of them.
    """
    notation = FORMATS[name].notation
    assert notation is not None, name

    def write(calls: Sequence[Written]) -> str:
        parts = (f"{before}{_call(notation, call, place)}{after}" for place, call in enumerate(calls, 1))
        return f"{section[0]}{between.join(parts)}{section[1]}"

    return write


def _call(notation: ArgumentNotation, call: Written, place: int) -> str:
    name, arguments = call
    members = arguments.items() if isinstance(arguments, Mapping) else [("arguments", arguments)]
    written = notation.separator.join(_argument(notation, key, value) for key, value in members)
    return f"{name}{notation.open.replace(INDEX, str(place))}{written}{notation.close}"


def _argument(notation: ArgumentNotation, key: str, value: Any) -> str:
    if isinstance(value, str) and notation.before_text is not None:
        before, text = notation.before_text, value
    else:
        kind = next(iter(sorted(type_names(value), reverse=True)))
        ways = notation.literals.written(value) or [json.dumps(value, ensure_ascii=False)]
        before, text = notation.before_value.replace(KIND, kind), ways[0]
    pad = "\n" if notation.padded else ""
    return f"{notation.before_key}{key}{before}{pad}{text}{pad}{notation.end}{notation.behind.replace(KEY, key)}"


_DSML: Final = '<｜DSML｜invoke name="'
_NS: Final = element_calls.MARK

WRITERS: Final[Mapping[str, Callable[[Sequence[Written]], str]]] = MappingProxyType(
    {
        "hermes": _each("<tool_call>\n", "\n</tool_call>"),
        "function_tags": _notated("function_tags", "<tool_call>\n<function=", "\n</tool_call>", "\n"),
        "argument_pairs": _notated("argument_pairs", "<tool_call>", between="\n"),
        "gemma4": _notated("gemma4", "<|tool_call>call:", "<tool_call|>"),
        "functiongemma": _notated("functiongemma", "<start_function_call>call:", "<end_function_call>"),
        "minicpm3": _notated(
            "minicpm3",
            "",
            between="\n",
            section=("<|tool_call_start|>\n```python\n", "\n```\n<|tool_call_end|>"),
        ),
        "olmo3": _notated("olmo3", "", between="\n", section=("<function_calls>", "</function_calls>")),
        "tool_code": _notated("tool_code", "", between="\n", section=("```tool_code\n", "\n```")),
        **{
            f"dsml_{section}": _notated(
                f"dsml_{section}", _DSML, "\n", section=(f"<｜DSML｜{section}>\n", f"</｜DSML｜{section}>")
            )
            for section in ("function_calls", "tool_calls")
        },
        "kimi_k3": _notated(
            "kimi_k3",
            '<|open|>call tool="',
            section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        ),
        "minimax_m2": _notated(
            "minimax_m2", '<invoke name="', "\n", section=("<minimax:tool_call>\n", "</minimax:tool_call>")
        ),
        "minimax_m3": _notated(
            "minimax_m3", f'{_NS}<invoke name="', "\n", section=(f"{_NS}<tool_call>\n", f"{_NS}</tool_call>")
        ),
        "minicpm5": _notated("minicpm5", '<function name="', between="\n"),
        "seed": _notated("seed", "<seed:tool_call>\n<function=", "\n</seed:tool_call>", "\n"),
        "zaya": _notated("zaya", "<zyphra_tool_call>\n<function=", "\n</zyphra_tool_call>", "\n"),
        "atem": _notated(
            "atem", '<atem:invoke name="', "\n", section=("<atem:function_calls>\n", "</atem:function_calls>")
        ),
        "step3": _notated(
            "step3",
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            "<｜tool_call_end｜>",
            section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        ),
        "hunyuan": _notated("hunyuan", "<tool_call>", section=("<tool_calls>", "</tool_calls>")),
        "longcat": _notated("longcat", "<longcat_tool_call>", between="\n"),
        "deepseek": _named(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        "kimi_k2": _named(
            "<|tool_call_begin|>functions.",
            f":{INDEX}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        "solar": _named(
            f"<|tool_call:begin|>call{INDEX}<|tool_call:name|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
            ("<|tool_calls|>", "<|calls|>"),
        ),
        "mistral": _named("[TOOL_CALLS]", "[ARGS]"),
        "qwen_brackets": _named("[Calling tool: ", "(", ")]"),
        "minimax_m1": _each("<tool_calls>\n", "\n</tool_calls>"),
        "llama3_json": lambda calls: (
            "<|python_tag|>" + "; ".join(_object(call, ("name", "parameters")) for call in calls)
        ),
        "apertus": lambda calls: f"<|tools_prefix|>{json.dumps([dict([call]) for call in calls])}<|tools_suffix|>",
        "internlm2": _each("<|action_start|><|plugin|>", "<|action_end|>"),
        "granite_function_call": _each("<function_call> ", ""),
        "gigachat": _each("<|function_call|>", ""),
        "cohere": _array("<|START_ACTION|>", "<|END_ACTION|>", ("tool_name", "parameters")),
        "granite": _array("<|tool_call|>"),
        "lfm2": _notated("lfm2", "", between=", ", section=("<|tool_call_start|>[", "]<|tool_call_end|>")),
        "pythonic": _notated("pythonic", "", between=", ", section=("[", "]")),
        "json_list": _array(""),
        "functools": _array("functools"),
        "tool_calls_array": _array("<tool_calls>", "</tool_calls>"),
        "nemotron2": _array("<TOOLCALL>", "</TOOLCALL>"),
        "command_r": _array("Action:\n```json\n", "\n```", ("tool_name", "parameters")),
    }
)
"""Format -> what writes its calls."""
