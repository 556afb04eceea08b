"""Proves what a template does with tools: declarations, past calls and their wire format, results.

Reads no template source. A format is found by handing the rendered call of a known tool with known arguments to every
format there is: the one that reads exactly that call back is the format. Read next: ``probe_trial.py`` (the renders),
``tool_formats/`` (the formats).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from troth.contracts.tools import CallForm
from troth.text.probe_trial import (
    ANSWER,
    CALL_IDS,
    DECLARATIONS,
    FIRST,
    RESULT,
    SECOND,
    SECOND_RESULT,
    USER,
    Sample,
    Trial,
    assistant,
    common_prefix,
    excerpt,
    in_order,
    user,
)
from troth.text.tool_formats.derived import derived_form
from troth.text.tool_formats.written import WRITERS

ExpectedCall = tuple[str, Mapping[str, Any]]
"""Name and arguments of a call that a reply is known to hold."""


class FormatReader(Protocol):
    """All wire formats there are, asked at once."""

    def reading(
        self, reply: str, calls: Sequence[ExpectedCall], tools: Sequence[Mapping[str, Any]], tail: str
    ) -> tuple[str, ...]:
        """Names of the formats that read exactly these calls out of ``reply``, the best fitting first.

        ``tail`` is the end of the prompt that the reply answers.
        """

    def instructing(self, prompt: str, control: str) -> tuple[str, ...]:
        """Names of the formats that ``prompt`` teaches and ``control``, the same without tools, does not."""

    def reads(
        self,
        form: CallForm,
        reply: str,
        calls: Sequence[ExpectedCall],
        tools: Sequence[Mapping[str, Any]],
        tail: str,
    ) -> bool:
        """Whether a form that is none of these reads exactly these calls out of ``reply``."""

    def is_bare(self, name: str, reply: str) -> bool:
        """Whether format ``name`` read ``reply`` for want of any marker in it."""


_DECLARATION_FORMS: Final[tuple[dict[str, Any], ...]] = (
    {"declarations": "wrapped"},
    {"declarations": "flat"},
    {"declarations": "functions"},
    {"declarations": "definitions"},
    {"declarations": "wrapped", "system_with_tools": True, "system": "leading"},
)
_CALL_FORMS: Final[tuple[dict[str, Any], ...]] = tuple(
    {**content, "short_call_ids": short, "arguments": arguments}
    for content in ({}, {"null_content": True}, {"content": "parts"})
    for short in (False, True)
    for arguments in ("object", "text")
)
_PLAIN: Final = {
    "type": "function",
    "function": {"name": "qvplain", "parameters": {"properties": {"qvmap": {"type": "object"}, "qvany": {}}}},
}
"""A declaration with hardly anything in it, as clients send them too."""
_SAMPLES: Final = ((FIRST, SECOND), (replace(FIRST, number=None), replace(SECOND, number=None)))
"""With two arguments, then with one: some templates forget what stands between arguments."""
_TAIL: Final = 256
_RESULT_FORMS: Final = ("text", "list")


@dataclass(frozen=True, slots=True)
class _Reply:
    text: str
    tail: str

    def reads_as(self, form: CallForm, formats: FormatReader, *samples: Sample) -> bool:
        calls = [(sample.name, sample.arguments) for sample in samples]
        return formats.reads(form, self.text, calls, DECLARATIONS, self.tail)

    def read_by(self, formats: FormatReader, *samples: Sample) -> tuple[str, ...]:
        calls = [(sample.name, sample.arguments) for sample in samples]
        return formats.reading(self.text, calls, DECLARATIONS, self.tail)


@dataclass(frozen=True, slots=True)
class ToolFindings:
    """What was found; the fields are those of ``TemplateCapabilities``."""

    tool_declarations: bool = False
    tool_format: str | None = None
    call_form: CallForm | None = None
    tool_history: bool = False
    tool_results: bool = False
    parallel_tool_calls: bool = False
    replies: tuple[str, ...] = ()
    """Rendered replies with each call alone, then one with both: what a format of its own can be derived from."""


def prove_tools(trial: Trial, formats: FormatReader, declaration: CallForm | None = None) -> ToolFindings:
    """Everything about tools. Chooses the forms of declarations, calls and results.

    Calls are looked at even where declarations do not arrive: a client may then still declare tools in its own words.
    ``declaration`` is how the model itself says that its answers hold calls.
    """
    declared = _prove_declarations(trial)
    replies, names = _prove_calls(trial, formats)
    both = _reply(trial, FIRST, SECOND) if replies else None
    together = both.read_by(formats, FIRST, SECOND) if both is not None and names else ()
    # Of formats that read one call alike, the one that reads two as well.
    name = next((name for name in names if name in together), names[0] if names else None)
    parallel = name is not None and _prove_parallel(trial, both, holds=name in together)
    form: CallForm | None = None
    if declared and name is None:
        name, form, replies, parallel = _described(trial, formats, replies, declaration)
        both = None if form is not None else both
    if declared and form is None and (name is None or formats.is_bare(name, replies[0].text)):
        name = _taught(trial, formats, replies, name)
    history = bool(replies)
    if declared and name is not None and not history:
        replies, both, parallel = _write_history(trial, formats, name, form)
    results = (declared or name is not None) and _prove_results(trial)
    return ToolFindings(
        tool_declarations=declared,
        tool_format=name,
        call_form=form,
        tool_history=history,
        tool_results=results,
        parallel_tool_calls=parallel,
        replies=tuple(reply.text for reply in (*replies, both) if reply is not None),
    )


def _prove_declarations(trial: Trial) -> bool:
    """Both tools arrive whole, and one alone brings nothing of the other."""
    without = trial.render([user()])
    for form in _DECLARATION_FORMS:
        other = trial.trying(**form)
        both = other.render([user()], tools=DECLARATIONS)
        if both is None or both == without or not _holds(both, FIRST) or not _holds(both, SECOND):
            continue
        alone = [other.render([user()], tools=[sample.declaration]) for sample in (FIRST, SECOND)]
        if any(
            text is None or any(word in text for word in _words(absent))
            for text, absent in zip(alone, (SECOND, FIRST), strict=True)
        ):
            continue
        plain = other.render([user()], tools=[_PLAIN]) is not None
        trial.use(**form, every_field=not plain)
        given = " with a system message" if "system" in form else ""
        return trial.note(
            "tool_declarations", True, f"given {form['declarations']}{given}: {excerpt(both, FIRST.name)}"
        )
    return trial.note("tool_declarations", False, "names and parameters of two tools do not reach the prompt")


def _words(sample: Sample) -> tuple[str, ...]:
    return sample.name, sample.text_key, sample.number_key


def _holds(text: str, sample: Sample) -> bool:
    return all(word in text for word in _words(sample))


def _prove_calls(trial: Trial, formats: FormatReader) -> tuple[tuple[_Reply, ...], tuple[str, ...]]:
    """Rendered replies with each call, and the formats that read them back, the best fitting first."""
    written: tuple[_Reply, ...] = ()
    for first, second in _SAMPLES:
        if first.number is None and not written:
            break
        for form in _CALL_FORMS:
            other = trial.trying(**form)
            one = _reply(other, first)
            two = None if one is None else _reply(other, second)
            if one is None or two is None:
                continue
            written = written or (one, two)
            others = two.read_by(formats, second)
            names = tuple(name for name in one.read_by(formats, first) if name in others)
            if names:
                trial.use(**form)
                also = f" (so do {', '.join(names[1:])})" if names[1:] else ""
                only = "" if first.number is not None else ", but only with a single argument"
                shown = f"{names[0]} reads a past call back{also}{only}: {excerpt(one.text, first.name)}"
                trial.note("tool_format", True, shown)
                return (one, two), names
    return written, ()


def _described(
    trial: Trial, formats: FormatReader, replies: tuple[_Reply, ...], declaration: CallForm | None
) -> tuple[str | None, CallForm | None, tuple[_Reply, ...], bool]:
    """A format of the model's own: declared beside its template, or derived from the past calls that it writes.

    Where calls are written, they must read back. Where none are, the declaration stands for itself. Returns its name
    and form, the replies it was found in, and whether two calls of one message read back.
    """
    if not replies:
        if declaration is None:
            return None, None, replies, False
        trial.note("tool_format", True, f"past calls are not written; the model declares {declaration.opens}")
        return "declared", declaration, replies, False
    for choices in _CALL_FORMS:
        other = trial.trying(**choices)
        one, two = _reply(other, FIRST), _reply(other, SECOND)
        if one is None or two is None:
            continue
        for name, form in (("declared", declaration), ("derived", _derived(other))):
            if form is None or not one.reads_as(form, formats, FIRST) or not two.reads_as(form, formats, SECOND):
                continue
            trial.use(**choices)
            trial.note("tool_format", True, f"{name}, reads a past call back: {excerpt(one.text, FIRST.name)}")
            both = _reply(trial, FIRST, SECOND)
            holds = both is not None and both.reads_as(form, formats, FIRST, SECOND)
            found = (one, two) if both is None else (one, two, both)
            return name, form, found, _prove_parallel(trial, both, holds=holds)
    return None, None, replies, False


def _derived(trial: Trial) -> CallForm | None:
    """What a past call has and a past answer in its place has not."""
    call = assistant("", tool_calls=[FIRST.call(CALL_IDS[0])])
    written, said = (trial.render([user(), turn], tools=DECLARATIONS, opening=False) for turn in (call, assistant()))
    return (
        derived_form(written, said, FIRST.name, FIRST.arguments) if written is not None and said is not None else None
    )


def _write_history(
    trial: Trial, formats: FormatReader, name: str, form: CallForm | None
) -> tuple[tuple[_Reply, ...], _Reply | None, bool]:
    """Past calls go into the content where the template writes none, if they then arrive and read back.

    Returns the replies with each call, the one with both, and whether that reads back.
    """
    if form is None and name not in WRITERS:
        return (), None, False
    other = trial.trying(written_calls=name, call_form=form)
    one, two = _reply(other, FIRST), _reply(other, SECOND)
    if one is None or two is None:
        return (), None, False

    def holds(reply: _Reply, *samples: Sample) -> bool:
        return reply.reads_as(form, formats, *samples) if form else name in reply.read_by(formats, *samples)

    if not holds(one, FIRST) or not holds(two, SECOND):
        return (), None, False
    trial.use(written_calls=name, call_form=form)
    trial.note("tool_history", False, f"written into the content instead: {excerpt(one.text, FIRST.name)}")
    both = _reply(trial, FIRST, SECOND)
    return (one, two), both, _prove_parallel(trial, both, holds=both is not None and holds(both, FIRST, SECOND))


def _taught(trial: Trial, formats: FormatReader, replies: tuple[_Reply, ...], name: str | None) -> str | None:
    """The format that the instructions beside the declarations teach, else ``name``.

    For templates that write no past calls, or write them so that no format reads them, or without any marker.
    """
    prompt, control = trial.render([user()], tools=DECLARATIONS), trial.render([user()])
    names = formats.instructing(prompt, control) if prompt is not None and control is not None else ()
    if name is not None and (len(names) != 1 or names[0] == name):
        return name
    if name is not None:
        seen = "past calls are written without a marker"
    elif replies:
        seen = f"no known format reads a past call back from {excerpt(replies[0].text, FIRST.name)}"
    else:
        seen = f"past calls are not written. {trial.last_failure}".strip()
    taught = ", ".join(names) or "no known format"
    trial.note("tool_format", len(names) == 1, f"{seen}; the instructions beside the declarations teach {taught}")
    return names[0] if len(names) == 1 else None


def _reply(trial: Trial, *samples: Sample) -> _Reply | None:
    """The assistant's turn that makes these calls, as rendered: without what opens and what ends the turn.

    Cut out of the whole by comparing with the prompt before it and with a turn of plain text in its place; a result
    follows where the template refuses a conversation that ends in a call.
    """
    ids = CALL_IDS[: len(samples)]
    calls = [sample.call(call_id) for sample, call_id in zip(samples, ids, strict=True)]
    results = [
        {"role": "tool", "content": text, "tool_call_id": call_id}
        for text, call_id in zip((RESULT, SECOND_RESULT), ids, strict=False)
    ]
    turn = [user(), assistant("", tool_calls=calls)]
    whole, ending = trial.render(turn, tools=DECLARATIONS, opening=False), ""
    if _are_written(whole, samples):
        plain = trial.render([user(), assistant()], tools=DECLARATIONS, opening=False)
        ending = plain[plain.rindex(ANSWER) + len(ANSWER) :] if plain is not None and ANSWER in plain else ""
    else:
        whole = trial.render([*turn, *results], tools=DECLARATIONS)
        if not _are_written(whole, samples) or not in_order(whole, USER, RESULT):
            return None
    assert whole is not None
    opened = trial.render([user()], tools=DECLARATIONS)
    start = max(_turn_start(whole, opened or ""), whole.index(USER) + len(USER))
    text = whole[start:].removesuffix(ending)
    return _Reply(text[: text.index(RESULT)] if RESULT in text else text, whole[max(0, start - _TAIL) : start])


def _turn_start(whole: str, opened: str) -> int:
    """Where the assistant's turn begins in ``whole``, given the prompt that opens another turn at the same place.

    Openings differ (``<think>`` where a past turn has ``<tool_call>``), and may begin alike; then the turn begins
    behind the last character that cannot stand inside a marker.
    """
    start = common_prefix(whole, opened)
    if start == len(opened):
        return start
    return max(whole.rfind(end, 0, start) for end in ("\n", ">", "]", " ")) + 1


def _are_written(text: str | None, samples: Sequence[Sample]) -> bool:
    """Whether all calls stand behind the user's message, their texts in order."""
    if not in_order(text, USER, *(sample.text for sample in samples)):
        return False
    assert text is not None
    return all(sample.name in text[text.index(USER) :] for sample in samples)


def _prove_results(trial: Trial) -> bool:
    """A result arrives behind its call, and not as a user's words would. Chooses the form of results."""
    call = assistant("", tool_calls=[FIRST.call(CALL_IDS[0])])
    result = {"role": "tool", "content": RESULT, "tool_call_id": CALL_IDS[0]}
    for form in _RESULT_FORMS:
        other = trial.trying(results=form)
        text = other.render([user(), call, result], tools=DECLARATIONS)
        if text is None or not in_order(text, USER, RESULT):
            continue
        if text == other.render([user(), call, user(RESULT)], tools=DECLARATIONS):
            return trial.note("tool_results", False, "a result is written as a user's message would be")
        trial.use(results=form)
        return trial.note("tool_results", True, f"a result is written as {excerpt(text, RESULT)}")
    text = trial.trying(results="user").render([user(), call, result], tools=DECLARATIONS)
    if in_order(text, USER, RESULT):
        trial.use(results="user")
        return trial.note("tool_results", False, "a result is not written; it is told as what a user says")
    return trial.note("tool_results", False, f"a result does not reach the prompt. {trial.last_failure}".strip())


def _prove_parallel(trial: Trial, both: _Reply | None, *, holds: bool) -> bool:
    """Two calls of one message read back, both, in order."""
    if both is None:
        return trial.note("parallel_tool_calls", False, f"two calls of one message: {trial.last_failure}")
    said = "read back in order" if holds else "do not read back"
    return trial.note(
        "parallel_tool_calls", holds, f"two calls of one message {said}: {excerpt(both.text, SECOND.name)}"
    )
