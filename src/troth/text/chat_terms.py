"""What a chat asks for beside its messages (tools, thinking), and what that comes to with one model's template.

Knows no HTTP field and no engine. Read next: ``thinking.py`` (the template's switch), ``tool_request.py`` (the policy),
``classifier.py`` (what reads the answer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from troth.contracts.answer import AnswerReading
from troth.contracts.bounds import INT64, mistyped, require_flag, require_integer
from troth.contracts.capabilities import TemplateCapabilities, ThinkingMode
from troth.contracts.grammar import Grammar
from troth.contracts.tools import ToolPolicy
from troth.errors import CapabilityUnavailable
from troth.text.call_pattern import Beside, CallPattern, answer_frame
from troth.text.channels import CHANNELS
from troth.text.grammar_parts import tool_field
from troth.text.lark_words import PatternTokens
from troth.text.thinking import thinking_variables
from troth.text.tool_calls import ToolSet
from troth.text.tool_request import read_policy

TERMS: Final = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "tool_validation",
    "thinking",
    "reasoning_effort",
    "reasoning_budget",
)
"""Names of the options that are terms."""
TAIL_CHARACTERS: Final = 256
"""Of the prompt's end, as much as the classifier looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """What a request asks of reasoning."""

    mode: ThinkingMode = "auto"
    effort: str | None = None
    budget: int | None = None
    """Tokens that reasoning may have; 0 turns it off."""
    param: str = "enable_thinking"
    """The field that switched it."""
    effort_param: str = "reasoning_effort"
    budget_param: str = "reasoning_budget"

    @property
    def off(self) -> bool:
        """Whether there is to be no reasoning."""
        return self.mode == "off" or self.budget == 0 or (self.mode == "auto" and self.effort == "none")


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What terms need to know of the model."""

    capabilities: TemplateCapabilities
    tokens: PatternTokens
    calls: CallPattern | None
    """How it writes calls; None where that is unknown, or no pattern."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who answers, and how the answer begins."""

    model: ChatModel
    thought: tuple[str, str] | None
    begun: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTerms:
    """The terms of one chat."""

    policy: ToolPolicy = field(default_factory=ToolPolicy)
    declarations: Sequence[Mapping[str, Any]] = ()
    """The policy's tools as the caller declared them."""
    thinking: Thinking = field(default_factory=Thinking)

    @property
    def shown_tools(self) -> list[Mapping[str, Any]] | None:
        """What the template is to declare; None: nothing."""
        return list(self.declarations) if self.declarations and self.policy.choice.mode != "none" else None

    @property
    def forces_calls(self) -> bool:
        """Whether the answer must be a call."""
        return self.policy.choice.mode in ("required", "named")

    @property
    def grammar_field(self) -> str:
        """The field behind a grammar that no other field asked for."""
        return "tool_choice" if self.forces_calls else "tools"

    def variables(self, capabilities: TemplateCapabilities) -> dict[str, Any]:
        """The template variables that ask for this way of thinking. Raises CapabilityUnavailable."""
        mode, thinking = self.thinking.mode, self.thinking
        if thinking.off:
            mode = "off"
        elif mode == "auto" and thinking.effort is not None and capabilities.reasoning is not None:
            mode = "on"
        effort = None if mode == "off" else thinking.effort
        return thinking_variables(capabilities, mode, effort=effort, param=thinking.param)

    def require_served(self, capabilities: TemplateCapabilities) -> tuple[str, ...]:
        """Check that this model can be offered the tools, and that they can be used.

        Returns:
            What of their schemas nobody checks, by the field.

        Raises:
            CapabilityUnavailable: its template was not proved to declare tools and to write calls, or its reasoning
                cannot be measured.
            RequestError: a tool that cannot be used.
        """
        thinking = self.thinking
        if thinking.budget is not None and not thinking.off and capabilities.reasoning is None:
            raise CapabilityUnavailable(
                "a reasoning budget", "this model marks no reasoning; leave it out", param=thinking.budget_param
            )
        if not self.policy.tools:
            return ()
        if not capabilities.tools:
            lacks = "declares no tools" if not capabilities.tool_declarations else "has no known way to write calls"
            raise CapabilityUnavailable("tools", f"this model's template {lacks}; leave them out", param="tools")
        notices = ToolSet(self.policy.tools).notices
        return tuple(
            f"{tool_field(place)}: {notice}"
            for place, tool in enumerate(self.policy.tools)
            for notice in notices.get(tool.name, ())
            if self.shown_tools
        )

    def untaken_effort(self, capabilities: TemplateCapabilities) -> str | None:
        """The field that asks for an effort, if nothing in this model's template takes one; None: it has its effect.

        Where there are no levels, any effort still switches reasoning on.
        """
        thinking, switched = self.thinking, capabilities.reasoning is not None and capabilities.thinking is not None
        if thinking.effort is None or thinking.off or switched or capabilities.effort is not None:
            return None
        return thinking.effort_param

    def bound(self, grammar: Grammar | None, model: ChatModel, prompt_text: str, *, param: str) -> Grammar | None:
        """The grammar an answer must match: the caller's, or that of the calls it makes, or both; None: any text.

        It binds what follows reasoning. Where the prompt has not begun some, and the model may, it leaves room for it.

        Args:
            grammar: What the caller asks for.
            model: That answers.
            prompt_text: As rendered.
            param: The field that asked for the grammar.

        Raises:
            CapabilityUnavailable: this model's calls can be put into no grammar, or not beside the caller's.
            RequestError: a tool's schema that cannot be followed.
        """
        marks, end = model.capabilities.reasoning, prompt_text.rstrip()
        begun = marks is not None and end.endswith(marks.open.rstrip())
        may_think = marks is not None and not begun and not end.endswith(marks.close) and not self.thinking.off
        thought = (marks.open, marks.close) if marks is not None and may_think else None
        channel = CHANNELS.get(marks.markers) if marks is not None else None
        headed = channel is not None and bool(channel.answer_header) and (begun or end.endswith(channel.prompt_tails))
        asked = _Asked(model, thought, begun)
        shows = bool(self.shown_tools)
        if self.forces_calls:
            # The answer is a call: there is no text that the caller's grammar could bind.
            grammar = Grammar(kind="calls", source=self._calls(asked, "nothing", "forced tool calls", "tool_choice"))
        elif grammar is not None and shows:
            grammar = replace(grammar, frame=self._calls(asked, "answer", f"{param} together with tools", param))
        elif grammar is not None and (thought is not None or headed):
            frame = answer_frame(thought, model.tokens, channel if headed else None, begun=begun)
            grammar = replace(grammar, frame=frame)
        elif shows and any(tool.strict for tool in self.policy.tools):
            grammar = Grammar(kind="calls", source=self._calls(asked, "text", "strict tools", "tools"))
        if grammar is None or marks is None or not begun or grammar.begins_after:
            return grammar
        return replace(grammar, begins_after=marks.close)

    def _calls(self, asked: _Asked, beside: Beside, capability: str, param: str) -> str:
        model = asked.model
        if model.calls is None:
            raise CapabilityUnavailable(
                capability, "this model writes calls in a way that no grammar is made of", param=param
            )
        return model.calls.source(
            self.policy, model.tokens, asked.thought, beside=beside, begun=asked.begun, param=param
        )

    def reading(self, model: ChatModel, prompt_text: str, *, continues: bool = False) -> AnswerReading | None:
        """How the answer to a prompt is to be read; None: all of it is text.

        Args:
            model: That answers.
            prompt_text: As rendered.
            continues: The prompt ends inside the text of an answer.
        """
        capabilities = model.capabilities
        marks = capabilities.reasoning
        tools = capabilities.tool_format
        if tools is not None and tools not in CHANNELS and not self.shown_tools:
            tools = None
        if marks is None and tools is None:
            return None
        budget = self.thinking.budget
        if self.thinking.off:
            # Where the template has a switch it has done its work; else whatever is begun is closed at once.
            budget = 0 if capabilities.thinking is None else None
        return AnswerReading(
            reasoning=marks.markers if marks is not None else None,
            tools=tools,
            call_form=capabilities.call_form if tools is not None else None,
            policy=self.policy,
            prompt_tail=prompt_text[-TAIL_CHARACTERS:],
            continues="text" if continues else None,
            reasoning_budget=budget if marks is not None else None,
            close_ids=tuple(model.tokens.encode(marks.close, add_special=False)) if marks is not None else (),
        )


def read_terms(options: Mapping[str, Any]) -> ChatTerms:
    """The terms among a caller's options, which are named as in ``TERMS``; None means absent. Raises RequestError."""
    given = {name: options[name] for name in TERMS if options.get(name) is not None}
    parallel, thinking = given.get("parallel_tool_calls", True), given.get("thinking")
    effort, budget = given.get("reasoning_effort"), given.get("reasoning_budget")
    for name, flag in (("parallel_tool_calls", parallel), ("thinking", False if thinking is None else thinking)):
        require_flag(name, flag)
    if effort is not None and not isinstance(effort, str):
        raise mistyped("reasoning_effort", "a string", effort)
    if budget is not None:
        require_integer("reasoning_budget", budget, 0, INT64)
    tools = given.get("tools")
    policy = read_policy(
        tools, given.get("tool_choice"), parallel=parallel, validation=given.get("tool_validation"), eager=True
    )
    mode: ThinkingMode = "auto" if thinking is None else "on" if thinking else "off"
    return ChatTerms(
        policy=policy,
        declarations=tools or (),
        thinking=Thinking(mode=mode, effort=effort, budget=budget, param="thinking"),
    )
