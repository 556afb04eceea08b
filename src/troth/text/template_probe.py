"""Proves what a chat template can do, by rendering marked conversations and looking at what came out.

Never by a model's name and never by reading the template. Refuses to know how anything is served. Read next:
``probe_trial.py`` (the renders), ``probe_tools.py``, ``probe_reasoning.py``, ``probe_media.py`` (the questions),
``contracts/capabilities.py`` (the answers).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from troth.contracts.capabilities import Evidence, SystemPlace, TemplateCapabilities
from troth.contracts.tools import CallForm
from troth.text.chat_renderer import ChatRenderer
from troth.text.message_form import ContentForm, DeclarationForm, MessageForm
from troth.text.probe_media import prove_media, prove_translation
from troth.text.probe_reasoning import prove_effort, prove_reasoning, prove_start, prove_thinking
from troth.text.probe_tools import FormatReader, ToolFindings, prove_tools
from troth.text.probe_trial import (
    ANSWER,
    LATE_SYSTEM,
    SECOND_USER,
    SYSTEM,
    USER,
    Trial,
    assistant,
    excerpt,
    in_order,
    user,
)

_CHAT_FORMS: Final[tuple[tuple[ContentForm, DeclarationForm], ...]] = (
    ("text", "wrapped"),
    ("parts", "wrapped"),
    ("text", "functions"),
)


_UNHEARD: Final = "a user's text does not reach the prompt"
_MOMENT: Final = datetime(2026, 1, 2, 3, 4, 5)
"""Time stands still while a template is probed: a clock in the prompt must not look like an effect."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What was proved, and the form the template takes conversations in."""

    capabilities: TemplateCapabilities
    form: MessageForm
    replies: tuple[str, ...] = ()
    """Rendered replies with known calls, where there are any: see ``ToolFindings.replies``."""

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What was seen."""
        return self.capabilities.evidence

    @property
    def hears_nobody(self) -> bool:
        """Whether the template writes prompts, and in none of them what a user says."""
        return any(item.capability == "chat" and item.shown == _UNHEARD for item in self.evidence)


def probe_template(renderer: ChatRenderer, formats: FormatReader, declaration: CallForm | None = None) -> Probe:
    """Prove everything about a model's template (and its tool template). Raises nothing a template could cause.

    ``formats`` tells which wire formats read given calls back out of a rendered reply; ``declaration`` is what the
    model's tokenizer config says of them, if it does.
    """
    trial = Trial(renderer.with_form(MessageForm(), now=_MOMENT))
    chat = _prove_chat(trial)
    if not chat:
        translation = prove_translation(trial)
        media = prove_media(trial)
        capabilities = TemplateCapabilities(media=media, translation=translation, evidence=tuple(trial.notes))
        return Probe(capabilities, trial.form)
    system = _prove_system(trial)
    trial.use(system=system)
    found = prove_tools(trial, formats, declaration)
    capabilities = _with_reasoning(trial, found, trial.form.system)
    return Probe(capabilities, trial.form, found.replies)


def _with_reasoning(trial: Trial, found: ToolFindings, system: SystemPlace) -> TemplateCapabilities:
    history = _prove_history(trial)
    tools = found.tool_declarations or found.tool_history
    thinking = prove_thinking(trial, tools=tools)
    reasoning = prove_reasoning(trial, thinking, tools=tools)
    starts = prove_start(trial)
    effort = prove_effort(trial, thinking)
    media = prove_media(trial)
    return TemplateCapabilities(
        chat=True,
        history=history,
        system=system,
        tool_declarations=found.tool_declarations,
        tool_format=found.tool_format,
        call_form=found.call_form,
        tool_history=found.tool_history,
        tool_results=found.tool_results,
        parallel_tool_calls=found.parallel_tool_calls,
        reasoning=reasoning,
        starts_in_reasoning=starts,
        thinking=thinking,
        effort=effort,
        media=media,
        translation=prove_translation(trial),
        evidence=tuple(trial.notes),
    )


def _prove_chat(trial: Trial) -> bool:
    """A user's text arrives, as a string or as a part. Chooses the form of content."""
    for content, declarations in _CHAT_FORMS:
        other = trial.trying(content=content, declarations=declarations)
        text = other.render([user()])
        control = other.render([user(SECOND_USER)])
        if text is None or control is None:
            continue
        if USER in text and text.replace(USER, SECOND_USER) == control:
            trial.use(content=content, declarations=declarations)
            return trial.note("chat", True, f"content given as {content}: {excerpt(text, USER)}")
    return trial.note("chat", False, trial.last_failure or _UNHEARD)


def _prove_history(trial: Trial) -> bool:
    text = trial.render([user(), assistant(), user(SECOND_USER)])
    holds = in_order(text, USER, ANSWER, SECOND_USER)
    shown = excerpt(text, ANSWER) if text is not None and holds else trial.last_failure or "an answer is not written"
    return trial.note("history", holds, shown)


def _prove_system(trial: Trial) -> SystemPlace:
    """Where a system message arrives and is not what a user's would be."""
    system = {"role": "system", "content": SYSTEM}
    text = trial.render([system, user()])
    if not in_order(text, SYSTEM, USER):
        shown = "a system message does not reach the prompt" if text is not None else trial.last_failure
        trial.note("system", False, shown)
        return "none"
    if text == trial.render([user(SYSTEM), user()]):
        trial.note("system", False, "a system message is written as a user's would be")
        return "none"
    late = {"role": "system", "content": LATE_SYSTEM}
    middle = trial.render([system, user(), assistant(), late, user(SECOND_USER)])
    control = trial.render([system, user(), assistant(), user(LATE_SYSTEM), user(SECOND_USER)])
    anywhere = in_order(middle, SYSTEM, USER, ANSWER, LATE_SYSTEM, SECOND_USER) and middle != control
    place: SystemPlace = "anywhere" if anywhere else "leading"
    trial.note("system", True, f"{place}: {excerpt(text or '', SYSTEM)}")
    return place
