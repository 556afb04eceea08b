"""Owns the renders of a probe: conversations of marked words under a small budget, and notes of what came out.

Judges nothing. Read next: ``template_probe.py`` (the order of questions), ``probe_tools.py``, ``probe_reasoning.py``,
``probe_media.py`` (the questions).

Each word below stands for something a client could say and occurs nowhere else, so finding it proves that the text
got there, and its place proves as what.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from troth.contracts.capabilities import Evidence
from troth.errors import RequestError
from troth.text.chat_renderer import ChatRenderer
from troth.text.message_form import MessageForm

PROBE_STEPS: Final = 200_000
"""Budget of one render, beside what the conversation adds; the dearest of 166 published templates needs 35,000."""
MAX_RENDERS: Final = 200
"""Of one probe; what is asked after that counts as failed. Published templates need 133 at most."""
MAX_CHARACTERS: Final = 2**18
"""Of one render; they are all kept until the probe is over."""
_EXCERPT: Final = 160

USER, SECOND_USER, ANSWER = "qvuserone", "qvusertwo", "qvanswer"
SYSTEM, LATE_SYSTEM = "qvsystem", "qvlatesystem"
REASONING, OLD_REASONING = "qvreasoning", "qvoldreasoning"
RESULT, SECOND_RESULT = "qvresultone", "qvresulttwo"


@dataclass(frozen=True, slots=True)
class Sample:
    """One declared tool and a call of it, all in marked words."""

    name: str
    text_key: str
    text: str
    number_key: str
    number: int | None
    """None: the call leaves it out."""

    @property
    def declaration(self) -> dict[str, Any]:
        """The tool as a client declares it."""
        properties = {
            self.text_key: {"type": "string", "description": f"{self.name}text"},
            self.number_key: {"type": "integer", "description": f"{self.name}number"},
        }
        parameters = {"type": "object", "properties": properties, "required": [self.text_key]}
        function = {"name": self.name, "description": f"{self.name}purpose", "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def arguments(self) -> dict[str, Any]:
        """What the call is made with."""
        return {self.text_key: self.text} | ({} if self.number is None else {self.number_key: self.number})

    def call(self, call_id: str) -> dict[str, Any]:
        """The call as it stands in a past message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": call_id, "type": "function", "function": function}


FIRST: Final = Sample("qvtoolone", "qvplace", "qv text one", "qvdays", 73119)
SECOND: Final = Sample("qvtooltwo", "qvtopic", "qv text two", "qvlimit", 84226)
DECLARATIONS: Final = (FIRST.declaration, SECOND.declaration)
CALL_IDS: Final = ("call_qv0a1b2c3d4e5f", "call_qv5f4e3d2c1b0a")


@dataclass
class Trial:
    """One template under probe: its renderer in the form found so far, and the notes."""

    renderer: ChatRenderer
    notes: list[Evidence] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What renders that failed said, each once, in order."""
    _known: dict[str, str | None] = field(default_factory=dict)

    @property
    def form(self) -> MessageForm:
        """The form found so far."""
        return self.renderer.form

    def use(self, **choices: Any) -> None:
        """Go on in this form."""
        self.renderer = self.renderer.with_form(replace(self.form, **choices))

    def trying(self, **choices: Any) -> Trial:
        """A trial in another form that shares the notes."""
        return replace(self, renderer=self.renderer.with_form(replace(self.form, **choices)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        opening: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        """The prompt, or None where the template refused or failed; ``opening`` adds that of the answer."""
        key = json.dumps([repr(self.form), messages, tools, opening, variables or {}], sort_keys=True)
        if key not in self._known:
            self._known[key] = self._render(messages, tools, opening, variables or {})
        return self._known[key]

    def _render(self, messages: Any, tools: Any, opening: bool, variables: Mapping[str, Any]) -> str | None:
        if len(self._known) >= MAX_RENDERS:
            self._note_failure(f"{MAX_RENDERS} renders have not told what this template does")
            return None
        try:
            text = self.renderer.render(
                messages, tools=tools, add_generation_prompt=opening, variables=variables, max_steps=PROBE_STEPS
            )
        except RequestError as error:
            self._note_failure(str(error))
            return None
        if len(text) > MAX_CHARACTERS:
            self._note_failure(f"the template writes {len(text)} characters around a few words")
            return None
        return text

    def _note_failure(self, said: str) -> None:
        if said not in self.failures:
            self.failures.append(said)

    @property
    def last_failure(self) -> str:
        """The newest of them, cut short; empty when all renders went well."""
        return self.failures[-1][:_EXCERPT] if self.failures else ""

    def note(self, capability: str, holds: bool, shown: str) -> bool:
        """Write down what was seen; returns ``holds``."""
        self.notes.append(Evidence(capability, holds, shown))
        return holds


def user(text: str = USER) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str = ANSWER, **more: Any) -> dict[str, Any]:
    """An assistant's message."""
    return {"role": "assistant", "content": text, **more}


def in_order(text: str | None, *words: str) -> bool:
    """Whether all words stand in ``text``, each after the one before it."""
    if text is None:
        return False
    place = 0
    for word in words:
        found = text.find(word, place)
        if found < 0:
            return False
        place = found + len(word)
    return True


def excerpt(text: str, *words: str) -> str:
    """The part of ``text`` around the words, cut short, with line breaks written out."""
    places = [place for word in words if (place := text.find(word)) >= 0]
    start = max(0, min(places, default=len(text)) - _EXCERPT // 4)
    shown = repr(text[start : start + _EXCERPT])
    return ("..." if start else "") + shown


def common_prefix(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)
