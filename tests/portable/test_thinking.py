"""What a request asks of thinking becomes the template's own variables, by what the probe found."""

from __future__ import annotations

from typing import Any

import pytest

from troth.contracts.capabilities import (
    EffortCapability,
    ReasoningCapability,
    TemplateCapabilities,
    ThinkingCapability,
)
from troth.errors import CapabilityUnavailable, RequestError
from troth.text.thinking import nearest_level, thinking_variables

SWITCH = ThinkingCapability(on={"thinking": True}, off={"thinking": False}, kind="span", default="off")
REASONING = ReasoningCapability(markers="think", open="<think>", close="</think>", kept="none")
EFFORT = EffortCapability(variable="reasoning_effort", levels=("low", "high"))


def variables(mode: Any, **found: Any) -> dict[str, Any]:
    return thinking_variables(TemplateCapabilities(chat=True, **found), mode)


@pytest.mark.parametrize(("mode", "expected"), [("auto", {}), ("on", {"thinking": True}), ("off", {"thinking": False})])
def test_thinking_mode_is_the_variable_the_probe_found(mode: str, expected: dict[str, Any]) -> None:
    assert variables(mode, thinking=SWITCH, reasoning=REASONING) == expected


def test_thinking_on_where_answers_reason_by_themselves_needs_nothing() -> None:
    assert variables("on", reasoning=REASONING) == {}


def test_thinking_off_without_a_switch_is_left_to_the_budget() -> None:
    assert variables("off", reasoning=REASONING) == {}
    assert variables("off") == {}


def test_thinking_on_that_no_template_can_serve_is_refused_by_name() -> None:
    with pytest.raises(CapabilityUnavailable, match="thinking is not available") as caught:
        variables("on")
    assert caught.value.param == "enable_thinking"


def test_thinking_mode_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match="auto, on or off"):
        variables("maybe", thinking=SWITCH)


def test_thinking_effort_goes_with_the_mode() -> None:
    both = TemplateCapabilities(chat=True, thinking=SWITCH, effort=EFFORT)
    assert thinking_variables(both, "on", effort="high") == {"thinking": True, "reasoning_effort": "high"}
    assert thinking_variables(both, effort="medium") == {"reasoning_effort": "low"}
    assert thinking_variables(TemplateCapabilities(chat=True, thinking=SWITCH), effort="high") == {}


def test_thinking_effort_does_not_undo_the_switch_it_shares_a_variable_with() -> None:
    switch = ThinkingCapability(
        on={"reasoning_effort": "high"}, off={"reasoning_effort": "none"}, kind="instruction", default="on"
    )
    found = TemplateCapabilities(chat=True, thinking=switch, effort=EFFORT)
    assert thinking_variables(found, "off", effort="high") == {"reasoning_effort": "none"}


@pytest.mark.parametrize(
    ("effort", "level"),
    [("low", "low"), ("medium", "low"), ("high", "high"), ("max", "high"), ("none", "low"), ("huge", "low")],
)
def test_thinking_level_is_the_nearest_below(effort: str, level: str) -> None:
    assert nearest_level(effort, ("low", "high")) == level
