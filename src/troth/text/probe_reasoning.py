"""Proves what a template does with reasoning: markers, past reasoning, the switch, the start of an answer.

Reads no template source; every answer is a difference between renders. Read next: ``reasoning_markers.py`` (the known
pairs), ``probe_trial.py`` (the renders), ``thinking.py`` (uses the switch).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from troth.contracts.capabilities import (
    EffortCapability,
    ReasoningCapability,
    ReasoningKept,
    SwitchKind,
    ThinkingCapability,
    ThinkingMode,
)
from troth.text.message_form import ReasoningForm
from troth.text.probe_trial import (
    ANSWER,
    CALL_IDS,
    DECLARATIONS,
    FIRST,
    OLD_REASONING,
    REASONING,
    RESULT,
    SECOND_USER,
    USER,
    Trial,
    assistant,
    excerpt,
    in_order,
    user,
)
from troth.text.reasoning_markers import MARKERS, Markers, around, empty_at_end, open_at_end
from troth.text.thinking import EFFORTS

_FIELDS: Final = ("reasoning_content", "reasoning", "thinking", "tool_plan", "thought")
_FORMS: Final[tuple[ReasoningForm, ...]] = (*_FIELDS, "part", "blocks")

_SWITCHES: Final[tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...]] = (
    ({"enable_thinking": True}, {"enable_thinking": False}),
    ({"thinking": True}, {"thinking": False}),
    ({"reasoning": True}, {"reasoning": False}),
    ({"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
    ({"thinking_budget": -1}, {"thinking_budget": 0}),
    ({"reasoning_effort": "high"}, {"reasoning_effort": "none"}),
    ({"reasoning_effort": "high"}, {"reasoning_effort": "minimal"}),
)
"""Variables that published templates take to turn thinking on and off, tried in this order."""

_AT_ONCE: Final = (
    {name: value for on, _ in _SWITCHES for name, value in on.items()},
    {name: value for _, off in _SWITCHES for name, value in off.items()},
    {"reasoning_effort": "none"},
)
"""All switches together: a template that none of these changes has none of them."""

_EFFORTS: Final = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_LIKELIEST_LEVELS: Final = ("high", "low", "max", "medium", "xhigh", "minimal", "none")
_ECHOED_LEVELS: Final = ("low", "medium", "high")
_NO_LEVEL: Final = "qvlevel"


def prove_reasoning(trial: Trial, thinking: ThinkingCapability | None, *, tools: bool) -> ReasoningCapability | None:
    """The markers that past reasoning stands between, and which of it is kept. Chooses the form of reasoning."""
    variables = thinking.on if thinking else {}
    for form in _forms_heard(trial, variables, tools=tools):
        kept, text, word = _kept(trial.trying(reasoning=form), variables, tools=tools)
        markers = None if text is None else around(text, word)
        if text is None or markers is None:
            continue
        trial.use(reasoning=form)
        trial.note("reasoning", True, f"past reasoning given as {form} is kept ({kept}): {excerpt(text, word)}")
        return ReasoningCapability(markers=markers.name, open=markers.open, close=markers.close, kept=kept)
    stripped = _stripped(trial, variables)
    if stripped is not None:
        trial.note("reasoning", True, f"past reasoning is cut out of an answer by its markers {stripped.open!r}")
        return ReasoningCapability(markers=stripped.name, open=stripped.open, close=stripped.close, kept="none")
    for values in (variables, thinking.off if thinking else {}):
        text = trial.render([user()], variables=values)
        markers = None if text is None else open_at_end(text) or empty_at_end(text)
        if text is not None and markers is not None:
            trial.note("reasoning", True, f"past reasoning is dropped; an answer begins after {_tail(text)}")
            return ReasoningCapability(markers=markers.name, open=markers.open, close=markers.close, kept="none")
    forms = ", ".join(_FORMS)
    trial.note("reasoning", False, f"given as {forms} it is not written between markers, nor does an answer begin so")
    return None


def _forms_heard(trial: Trial, variables: Mapping[str, Any], *, tools: bool) -> tuple[ReasoningForm, ...]:
    """The forms worth trying: fields are tried one by one only if all of them at once leave a trace."""
    _, text, _ = _kept(trial, variables, tools=tools, fields=_FIELDS)
    return _FORMS if text is not None else _FORMS[len(_FIELDS) :]


def _kept(
    trial: Trial, variables: Mapping[str, Any], *, tools: bool, fields: tuple[str, ...] = ("reasoning_content",)
) -> tuple[ReasoningKept, str | None, str]:
    """Which past reasoning is written, with a render that shows it and the word that stood for it."""
    past = [user(), assistant(**dict.fromkeys(fields, OLD_REASONING)), user(SECOND_USER)]
    text = trial.render(past, variables=variables)
    if text is not None and OLD_REASONING in text:
        return "all", text, OLD_REASONING
    if tools:
        call = FIRST.call(CALL_IDS[0])
        loop = [
            user(),
            assistant("", **dict.fromkeys(fields, REASONING), tool_calls=[call]),
            {"role": "tool", "content": RESULT, "tool_call_id": CALL_IDS[0]},
        ]
        text = trial.render(loop, tools=DECLARATIONS, variables=variables)
        if text is not None and REASONING in text:
            return "tool_loop", text, REASONING
    text = trial.render([user(), assistant(**dict.fromkeys(fields, REASONING))], opening=False, variables=variables)
    return "none", text if text is not None and REASONING in text else None, REASONING


def _stripped(trial: Trial, variables: Mapping[str, Any]) -> Markers | None:
    """The pair that is cut out of a past answer, with what stands between; some templates expect it there."""

    def rendered(pairs: Sequence[Markers]) -> str:
        spans = "".join(markers.open + OLD_REASONING + markers.close for markers in pairs)
        # Two answers: some templates cut out of all but the last.
        messages = [user(), assistant(spans + ANSWER), user(SECOND_USER), assistant(), user()]
        return trial.render(messages, variables=variables) or ""

    if rendered(MARKERS).count(OLD_REASONING) == len(MARKERS):
        return None
    for markers in MARKERS:
        text = rendered([markers])
        if in_order(text, USER, ANSWER, SECOND_USER) and OLD_REASONING not in text:
            return markers
    return None


def prove_start(trial: Trial) -> bool:
    """Whether the prompt as it is by itself ends inside the reasoning span."""
    text = trial.render([user()]) or ""
    markers = open_at_end(text)
    return trial.note("starts_in_reasoning", markers is not None, f"the prompt ends with {_tail(text)}")


def prove_thinking(trial: Trial, *, tools: bool) -> ThinkingCapability | None:
    """The variables that switch thinking, proved with and, where there are tools, behind them too."""
    found: tuple[Mapping[str, Any], Mapping[str, Any], SwitchKind] | None = None
    plain = trial.render([user()])
    inert = all(trial.render([user()], variables=values) == plain for values in _AT_ONCE)
    for on, off in () if inert else _SWITCHES:
        kind = _switch_kind(trial, on, off, tools=tools)
        if kind == "span":
            found = on, off, kind
            break
        if kind is not None and found is None:
            found = on, off, kind
    if found is None:
        trial.note("thinking", False, f"none of {', '.join(_names())} switches it")
        return None
    on, off, kind = found
    texts: dict[ThinkingMode, str | None] = {
        "on": trial.render([user()], variables=on),
        "off": trial.render([user()], variables=off),
    }
    default: ThinkingMode = next((mode for mode, text in texts.items() if text == plain), "auto")
    shown = f"{dict(on)} ends with {_tail(texts['on'] or '')}, {dict(off)} with {_tail(texts['off'] or '')}"
    trial.note("thinking", True, f"{shown}; by itself it is {default}")
    return ThinkingCapability(on=dict(on), off=dict(off), kind=kind, default=default)


def _names() -> list[str]:
    return list(dict.fromkeys(name for on, _ in _SWITCHES for name in on))


def _switch_kind(trial: Trial, on: Mapping[str, Any], off: Mapping[str, Any], *, tools: bool) -> SwitchKind | None:
    kinds = {_difference(trial, on, off, None)}
    if tools:
        kinds.add(_difference(trial, on, off, DECLARATIONS))
    if None in kinds:
        return None
    return "span" if kinds == {"span"} else "instruction"


def _difference(
    trial: Trial, on: Mapping[str, Any], off: Mapping[str, Any], tools: tuple[dict[str, Any], ...] | None
) -> SwitchKind | None:
    with_on, with_off = (trial.render([user()], tools=tools, variables=values) for values in (on, off))
    if with_on is None or with_off is None or with_on == with_off:
        return None
    if _is_echoed(trial, on):
        return None  # any word would make a difference; that this one switches anything is not shown
    opens = open_at_end(with_on) is not None and open_at_end(with_off) is None
    empties = empty_at_end(with_off) is not None and empty_at_end(with_on) is None
    return "span" if opens or empties else "instruction"


def _is_echoed(trial: Trial, values: Mapping[str, Any]) -> bool:
    texts = (
        trial.render([user()], variables={name: _NO_LEVEL}) for name, value in values.items() if isinstance(value, str)
    )
    return any(text is not None and _NO_LEVEL in text for text in texts)


def prove_effort(trial: Trial, thinking: ThinkingCapability | None) -> EffortCapability | None:
    """A variable whose levels change the prompt, with one level for each prompt it can make.

    Where any word at all is written into the prompt, which ones a model was trained on cannot be seen; then they are
    the three that every API knows.
    """
    variables = thinking.on if thinking else {}
    plain = trial.render([user()], variables=variables)
    at_once = ({**variables, **dict.fromkeys(_EFFORTS, level)} for level in _LIKELIEST_LEVELS[:3])
    inert = all(trial.render([user()], variables=values) == plain for values in at_once)
    for variable in () if inert else _EFFORTS:
        unknown = trial.render([user()], variables={**variables, variable: _NO_LEVEL})
        if unknown is not None and _NO_LEVEL in unknown:
            trial.note("effort", True, f"{variable} is written into the prompt: {excerpt(unknown, _NO_LEVEL)}")
            return EffortCapability(variable=variable, levels=_ECHOED_LEVELS)
        by_text: dict[str, str] = {}
        for level in _LIKELIEST_LEVELS:
            text = trial.render([user()], variables={**variables, variable: level})
            if text is not None:
                by_text.setdefault(text, level)
        if len(by_text) > 1:
            levels = tuple(level for level in EFFORTS if level in by_text.values())
            trial.note("effort", True, f"{variable} of {', '.join(levels)} makes different prompts")
            return EffortCapability(variable=variable, levels=levels)
    trial.note("effort", False, f"none of {', '.join(_EFFORTS)} changes the prompt by its level")
    return None


def _tail(text: str) -> str:
    return repr(text[-40:])
