"""Asks every wire format in the registry what it reads out of a rendered reply or teaches in a prompt.

Knows no template and decides nothing about tools. Read next: ``tool_formats/`` (the registry), ``classifier.py`` (the
reading that serves requests, used here as it is), ``probe_tools.py`` (asks).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from troth.contracts.tools import CallForm, ToolPolicy, ToolSpec
from troth.text.channels import CHANNELS
from troth.text.classifier import Classifier, Reply, ReplyFormat
from troth.text.tool_calls import ToolSet
from troth.text.tool_formats import FORMATS, ToolFormat

_PROMPT_MARKS: Final[dict[str, tuple[str, ...]]] = {
    "granite": ("<|start_of_role|>available_tools<|end_of_role|>",),
    "lfm2": ("List of tools: ",),
    "json_list": ("[BEGIN OF AVAILABLE_TOOLS]", '{"name": "func_name1", "arguments": {'),
    "command_r": ("Write 'Action:' followed by a json-formatted list of actions",),
    "functools": ('functools[{"name": [function name], "arguments": [',),
    "pythonic": ("[func_name1(params_name1=params_value1",),
}
"""What only the prompts of one format's models say beside their declarations, for those that neither write past calls
as the model does nor show a readable example: Granite 3.0, LFM2, Hammer (as xLAM), Command R, Phi-4 mini and
ToolACE."""

# Examples name their parts in angle brackets: {"name": <function-name>, "arguments": <args-json-object>}.
_ARGUMENTS_BLANK: Final = re.compile(r'("(?:arguments|parameters)" ?: ?)<[\w ./-]+>')
_BLANK: Final = re.compile(r'("\w+" ?: ?)<[\w ./-]+>')
_NO_TOOLS: Final = ToolPolicy(tools=(ToolSpec(name="qvnone"),))


class RegistryReader:
    """The registry as the probe sees it. Keeps compiled tools, so one serves one thread."""

    def __init__(self) -> None:
        self._compiled: dict[str, tuple[ToolPolicy, ToolSet]] = {}

    def reading(
        self, reply: str, calls: Sequence[tuple[str, Mapping[str, Any]]], tools: Sequence[Mapping[str, Any]], tail: str
    ) -> tuple[str, ...]:
        """Names of the formats and channels that read exactly these calls out of ``reply``, the best fitting first.

        Some formats read what others write, and more. The best one leaves the least of the reply as text, then has the
        most of its own opening markers in it; among equals the registry's order decides. ``tail`` is the end of the
        prompt before the reply.
        """
        policy, compiled = self._tools(tools)
        found = []
        for place, name in enumerate((*FORMATS, *CHANNELS)):
            opens = _opens(name)
            present = [mark for mark in opens if mark.strip() in reply]
            if not present and not _begins_bare(FORMATS.get(name), reply):
                continue
            answer = _read(name, reply, policy, compiled, tail)
            if _are_same([(call.name, json.loads(call.arguments)) for call in answer.calls], calls):
                share = len(present) / len(opens) if opens else 0
                found.append((len(answer.text), -share, -len(present), place, name))
        return tuple(name for *_, name in sorted(found))

    def reads(
        self,
        form: CallForm,
        reply: str,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]],
        tail: str,
    ) -> bool:
        """Whether a form that stands in no registry reads exactly these calls out of ``reply``."""
        policy, compiled = self._tools(tools)
        answer = _read("derived", reply, policy, compiled, tail, form)
        return _are_same([(call.name, json.loads(call.arguments)) for call in answer.calls], calls)

    def instructing(self, prompt: str, control: str) -> tuple[str, ...]:
        """Names of the formats that ``prompt`` teaches and ``control``, the same without tools, does not.

        By an example that reads as a call, else by words of its own.
        """
        found = min(self._exemplified(prompt), default=None)
        if found is not None and not self._exemplified(control):
            return (found[-1],)
        return tuple(
            name
            for name, marks in _PROMPT_MARKS.items()
            if all(mark in prompt for mark in marks) and not all(mark in control for mark in marks)
        )

    def is_bare(self, name: str, reply: str) -> bool:
        """Whether format ``name`` read ``reply`` for want of any marker in it."""
        return not any(mark.strip() in reply for mark in _opens(name))

    def _exemplified(self, prompt: str) -> list[tuple[float, int, int, str]]:
        filled = _BLANK.sub(r'\1"x"', _ARGUMENTS_BLANK.sub(r"\1{}", prompt))
        compiled = ToolSet(_NO_TOOLS.tools)
        found = []
        for place, (name, form) in enumerate(FORMATS.items()):
            present = [mark for mark in form.opens if mark in filled]
            if form.soft or not present:
                continue
            answer = _read(name, filled, _NO_TOOLS, compiled, "")
            if any(error.reason == "unknown_tool" for error in answer.errors):
                found.append((-len(present) / len(form.opens), -len(present), place, name))
        return found

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolPolicy, ToolSet]:
        key = json.dumps(tools)
        if key not in self._compiled:
            functions = [tool["function"] for tool in tools]
            specs = tuple(ToolSpec(name=item["name"], parameters=item["parameters"]) for item in functions)
            self._compiled[key] = ToolPolicy(tools=specs, validation="forward"), ToolSet(specs)
        return self._compiled[key]


def _opens(name: str) -> tuple[str, ...]:
    return FORMATS[name].opens if name in FORMATS else (CHANNELS[name].header_end, *CHANNELS[name].starts)


def _are_same(read: Sequence[tuple[str, Any]], known: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether two lists of calls agree, a number written as text aside: what its type is, the schema decides."""
    return [(name, _as_text(arguments)) for name, arguments in read] == [(n, _as_text(a)) for n, a in known]


def _as_text(arguments: Any) -> Any:
    return {key: str(value) for key, value in arguments.items()} if isinstance(arguments, Mapping) else arguments


def _begins_bare(form: ToolFormat | None, reply: str) -> bool:
    return form is not None and reply.lstrip().startswith(form.bare or ("\0",))


def _read(name: str, text: str, policy: ToolPolicy, tools: ToolSet, tail: str, form: CallForm | None = None) -> Reply:
    """The whole of ``text`` read as an answer in format ``name``, which is ``form`` where no module describes it."""
    classifier = Classifier(ReplyFormat.named(tools=name, call_form=form), policy, tools=tools, prompt_tail=tail)
    answer = Reply()
    answer.add(classifier.push(text))
    answer.add(classifier.flush())
    return answer
