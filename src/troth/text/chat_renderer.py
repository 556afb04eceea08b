"""Owns the way from checked messages to a template's prompt: which of the templates, in which form, with which tools.

Knows no token and proves nothing. Read next: ``message_form.py`` and ``tool_declarations.py`` (the shaping),
``chat_template.py`` (the rendering), ``template_probe.py`` (where the form comes from).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from troth.text.chat_template import ChatTemplate
from troth.text.message_form import MessageForm, shape_declarations, shape_messages
from troth.text.tool_declarations import declarations_for_template


class ChatRenderer:
    """A model's template, or its two: some have one for chats with tools. Safe to use from several threads."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        tool_template: ChatTemplate | None = None,
        form: MessageForm | None = None,
        now: datetime | None = None,
    ) -> None:
        """Keep the templates.

        Args:
            template: Renders what has no tools, and what has them where there is no other.
            tool_template: Renders what has tools.
            form: What the probe found; None is the usual one.
            now: A moment at which time stands still; None is the template's own clock.
        """
        self.template: Final = template
        self.tool_template: Final = tool_template
        self.form: Final = form or MessageForm()
        self._now: Final = now

    def with_form(self, form: MessageForm, *, now: datetime | None = None) -> ChatRenderer:
        """The same templates, read in another form, and at ``now`` where one is given."""
        return ChatRenderer(self.template, tool_template=self.tool_template, form=form, now=now or self._now)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
    ) -> str:
        """The prompt text of normalised messages (``messages.py``); ``tools`` as a client declares them.

        An empty list of tools is none. ``variables`` do not replace what the conversation itself sets.

        Raises:
            RequestError: a declaration without a function or name; the template refused, failed, or did too much.
        """
        declared = declarations_for_template(tools) if tools else None
        template = self.tool_template if declared and self.tool_template else self.template
        moment = self._now
        values = shape_declarations(declared, self.form, template.now if moment is None else lambda: moment)
        if moment is not None:
            values["strftime_now"] = moment.strftime
        return template.render(
            shape_messages(messages, self.form, with_tools=declared is not None),
            tools=values.pop("tools", None),
            add_generation_prompt=add_generation_prompt,
            variables={**(variables or {}), **values},
            max_steps=max_steps,
        )
