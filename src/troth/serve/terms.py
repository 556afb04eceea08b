"""What a chat body asks of tools and thinking, under every name that clients use for it.

Refuses to know what a model can do: ``text/chat_terms.py`` says what becomes of the terms. Read next:
``openai_chat.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from troth.contracts.bounds import mistyped_json, shown_json
from troth.contracts.capabilities import ThinkingMode
from troth.errors import RequestError
from troth.serve.fields import Fields
from troth.text.chat_terms import ChatTerms, Thinking
from troth.text.tool_request import read_policy

_Value = TypeVar("_Value", str, int)
_SWITCH: Final[dict[str, ThinkingMode]] = {"enabled": "on", "disabled": "off", "adaptive": "auto"}


def read_terms(fields: Fields) -> ChatTerms:
    """The terms of one chat. Raises RequestError."""
    choice = fields.raw("tool_choice")
    if choice is not None and not isinstance(choice, str | dict):
        raise mistyped_json("tool_choice", "a string or an object", choice)
    declarations = fields.array("tools") or []
    policy = read_policy(
        declarations,
        choice,
        parallel=fields.flag("parallel_tool_calls", default=True),
        validation=fields.text("tool_validation"),
        eager=fields.flag("stream"),
    )
    return ChatTerms(policy=policy, declarations=declarations, thinking=_thinking(fields))


def _thinking(fields: Fields) -> Thinking:
    """The wish behind up to four fields. Those that contradict each other are refused, by name."""
    reasoning, thinking = fields.object("reasoning") or Fields({}), fields.object("thinking") or Fields({})
    modes: dict[str, str] = {}
    if fields.raw("enable_thinking") is not None:
        modes["enable_thinking"] = "on" if fields.flag("enable_thinking") else "off"
    if (kind := thinking.text("type")) is not None:
        if kind not in _SWITCH:
            raise RequestError(
                f"thinking.type must be {', '.join(_SWITCH)}, not {shown_json(kind)}", param=thinking.name("type")
            )
        modes["thinking.type"] = _SWITCH[kind]
    efforts = {"reasoning_effort": fields.text("reasoning_effort"), "reasoning.effort": reasoning.text("effort")}
    budgets = {
        "reasoning.budget": reasoning.integer("budget", 0),
        "thinking.budget_tokens": thinking.integer("budget_tokens", 0),
    }
    effort_field, effort = _only(efforts)
    budget_field, budget = _only(budgets)
    for field, off in ((effort_field, effort == "none"), (budget_field, budget == 0)):
        if off:
            modes[field] = "off"
    field, mode = _only({name: mode for name, mode in modes.items() if mode != "auto"})
    return Thinking(
        mode="on" if mode == "on" else "off" if mode == "off" else "auto",
        effort=effort,
        budget=budget,
        param=field or "enable_thinking",
        effort_param=effort_field,
        budget_param=budget_field,
    )


def _only(given: Mapping[str, _Value | None]) -> tuple[str, _Value | None]:
    """The one value, or the one that several fields agree on, with the first field that has it."""
    values = {field: value for field, value in given.items() if value is not None}
    if len(set(values.values())) > 1:
        *_, last = values
        raise RequestError(f"{' and '.join(values)} contradict each other; send one of them", param=last)
    return next(iter(values.items()), ("", None))
