"""What a model's chat template was proved to do, and the evidence: facts that other rings read, no template.

Whoever proved them is not known here; nothing renders. Read next: ``text/template_probe.py`` (proves them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from troth.contracts.tools import CallForm

SystemPlace = Literal["none", "leading", "anywhere"]
"""Where a system message is heard as one: nowhere, only at the start, or in the middle of a conversation too."""

ReasoningKept = Literal["none", "tool_loop", "all"]
"""Past reasoning the template writes: none, that of the answer still calling tools, or that of every turn."""

SwitchKind = Literal["span", "instruction"]
"""How thinking is switched: by opening or emptying the reasoning span, or only by words in the prompt."""

ThinkingMode = Literal["auto", "on", "off"]
"""What a request asks of thinking; auto leaves it to the template."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why one capability holds or not."""

    capability: str
    """Its name, as the fields of ``TemplateCapabilities``."""
    holds: bool
    shown: str
    """What was rendered and what came out, in a few words and a short excerpt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningCapability:
    """How an answer's reasoning is marked, with the exact text of the markers."""

    markers: str
    """Name of the pair, such as ``think``."""
    open: str
    close: str
    kept: ReasoningKept
    """Which past reasoning a prompt still holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingCapability:
    """The template variables that turn thinking on and off."""

    on: Mapping[str, object]
    off: Mapping[str, object]
    kind: SwitchKind
    default: ThinkingMode
    """Which of the two a prompt without the variables equals; auto when neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortCapability:
    """A template variable that says how much to think."""

    variable: str
    levels: tuple[str, ...]
    """Values whose prompts differ from each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """What one template (with its tool template, where a model has two) was proved to do."""

    chat: bool = False
    """A user's text reaches the prompt."""
    history: bool = False
    """So does a conversation of several turns, in order."""
    system: SystemPlace = "none"
    tool_declarations: bool = False
    """Names and parameters of all tools reach the prompt."""
    tool_format: str | None = None
    """The one wire format that past calls are written in, and so the one answers are read by. None: tools are off."""
    call_form: CallForm | None = None
    """What the format is, where it is ``derived`` from the template's own calls or ``declared`` by the model."""
    tool_history: bool = False
    """The template writes past calls itself. False with a format: the format comes from the prompt's instructions."""
    tool_results: bool = False
    """A result reaches the prompt as one, told apart from what a user says."""
    parallel_tool_calls: bool = False
    """Several calls of one message are written so that they read back in order."""
    reasoning: ReasoningCapability | None = None
    starts_in_reasoning: bool = False
    """The prompt as the template makes it by itself ends inside the reasoning span."""
    thinking: ThinkingCapability | None = None
    effort: EffortCapability | None = None
    media: Mapping[str, str] | None = None
    """Kind of content part (image, audio, video) -> the placeholder written where the part stood; None for none."""
    translation: bool = False
    """The template takes language codes beside a text and shows only the text."""
    evidence: tuple[Evidence, ...] = ()

    @property
    def tools(self) -> bool:
        """Whether tools can be offered: they are declared, and calls are written in exactly one known format."""
        return self.tool_declarations and self.tool_format is not None
