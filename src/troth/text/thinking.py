"""Turns what a request asks of thinking into variables of the template. A pure function of the probe's findings.

Knows no HTTP field and no model. Read next: ``contracts/capabilities.py`` (the findings), ``probe_reasoning.py``.
"""

from __future__ import annotations

from typing import Any, Final

from troth.contracts.capabilities import TemplateCapabilities, ThinkingMode
from troth.errors import CapabilityUnavailable, RequestError

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Levels of effort that APIs and templates know, from the least."""


def thinking_variables(
    capabilities: TemplateCapabilities,
    mode: ThinkingMode = "auto",
    *,
    effort: str | None = None,
    param: str = "enable_thinking",
) -> dict[str, Any]:
    """The template variables for a way of thinking; none for ``auto``, which leaves it to the template.

    A template without a switch can still serve ``on`` when its answers reason by themselves, and ``off`` when they
    do not reason at all. Off where answers always reason is the reasoning budget's work (it forces an immediate close),
    so it is no error either. An effort is passed on where the template has levels; one it lacks is the nearest below,
    or the least.

    Raises:
        CapabilityUnavailable: on was asked for and no way is known to make this model reason.
        RequestError: a mode that is none of the three.
    """
    if mode not in ("auto", "on", "off"):
        raise RequestError(f"{param} must be auto, on or off, not {mode!r}", param=param)
    switch = capabilities.thinking
    if mode == "on" and switch is None and capabilities.reasoning is None:
        raise CapabilityUnavailable("thinking", "this model's template knows no reasoning; leave it out", param=param)
    variables: dict[str, Any] = {}
    if switch is not None and mode != "auto":
        variables |= switch.on if mode == "on" else switch.off
    if effort is not None and capabilities.effort is not None:
        variables.setdefault(capabilities.effort.variable, nearest_level(effort, capabilities.effort.levels))
    return variables


def nearest_level(effort: str, levels: tuple[str, ...]) -> str:
    """The level itself, else the nearest one below it, else the least one there is. An unknown word is the middle."""
    order = {name: place for place, name in enumerate(EFFORTS)}
    wanted = order.get(effort, order["medium"])
    below = [level for level in levels if order.get(level, wanted) <= wanted]
    return max(below, key=lambda level: order.get(level, 0)) if below else levels[0]
