"""The shared tool-call corpus, and what ``docs/tools.md`` says about it: how a row is run, which rows differ and why.

The page is read, not repeated: a row that fails without a reason there fails its test, and so does a listed row that
passes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from tests.shared_data import shared
from troth.contracts.events import SegmentKind
from troth.contracts.tools import ToolPolicy, ToolSpec
from troth.text.classifier import Classifier, Output, Piece, Reply, ReplyFormat
from troth.text.tool_calls import ToolSet

DOCS = Path(__file__).parents[2] / "docs" / "tools.md"
NUM_SPLITS = 20

# Control tokens of these families that are no marker of their format: in an engine they arrive as such, and are hidden.
CONTROL = re.compile(
    "("
    + "|".join(
        re.escape(token)
        for token in (
            "<|role_end|>",
            "<|CHATBOT_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|eot|>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
        )
    )
    + ")"
)

Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    return [json.loads(line) for line in shared(f"toolcalls/{name}").read_text().splitlines()]


@cache
def page() -> str:
    return DOCS.read_text()


def table(heading: str) -> Iterator[list[str]]:
    """The cells of the table below a heading of the page, without its head."""
    section = page().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    for line in [line for line in section.splitlines() if line.startswith("|")][2:]:
        yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


@cache
def formats() -> dict[str, ReplyFormat]:
    """Corpus format -> ours."""
    found = {}
    for _, formats_of_family, tools, reasoning, *_ in table("Families"):
        for name in formats_of_family.split(", "):
            found[name.strip("`")] = ReplyFormat.named(tools=_name(tools), reasoning=_name(reasoning))
    return found


@cache
def reasoning_formats() -> dict[str, tuple[ReplyFormat, bool]]:
    """Parser of the reasoning cases -> our form, and whether its models' prompts open the span."""
    return {
        parser: (ReplyFormat.named(reasoning=_name(form)), opened == "yes")
        for parser, form, opened in table("Reasoning parsers")
    }


@cache
def exceptions() -> dict[str, str]:
    """Rows that do not come out as the peer expects -> why not."""
    return {cells[0]: cells[1] for cells in table("Rows that differ")}


def _name(cell: str) -> str | None:
    return None if cell == "none" else cell


@cache
def _compiled(tools: str) -> ToolSet:
    return ToolSet([ToolSpec(name=item["name"], parameters=item["parameters"]) for item in json.loads(tools)])


def declared(row: Row) -> ToolSet:
    """The row's tools; where a peer's test declares none, those it expects to be called, with any arguments."""
    functions = [tool.get("function", tool) for tool in row.get("tools") or []]
    if not functions:
        names = {call["name"]: None for call in row["expected"].get("tool_calls") or []} or {"some_tool": None}
        functions = [{"name": name} for name in names]
    return _compiled(json.dumps([{"name": f["name"], "parameters": f.get("parameters")} for f in functions]))


def prompt_tail(row: Row, form: ReplyFormat) -> str:
    """The end of the prompt, as the row says or as its raw text implies: a lone closing marker was opened before."""
    options = row.get("options") or {}
    if "prompt_tail" in options or form.reasoning is None:
        return str(options.get("prompt_tail", ""))
    opened = options.get("reasoning_opened_by_prompt")
    if opened is None and options.get("enable_thinking") is not False:
        close = next((mark for mark in form.reasoning.closes if mark in row["raw"]), None)
        opened = close is not None and not any(mark in row["raw"].split(close)[0] for mark in form.reasoning.opens)
    return form.reasoning.opens[0] if opened else ""


def prefill(row: Row) -> tuple[str, str, SegmentKind | None]:
    """Text and reasoning that the prompt holds already, and which of them goes on."""
    options = row.get("options") or {}
    if "last_message" in options:
        return "", "", "text"
    if "prefill" not in options:
        return "", "", None
    return options["prefill"]["content"], options["prefill"]["reasoning"], _CONTINUED[options["continue"]]


_CONTINUED: dict[str, SegmentKind] = {"content": "text", "reasoning": "reasoning"}


def split(text: str, random: Random, number: int) -> list[str]:
    """``text`` cut at up to six random bytes, as a detokenizer hands it on: whole characters. Split 0 cuts at all."""
    data = text.encode()
    places = range(1, len(data))
    cuts = places if number == 0 else sorted(random.sample(places, min(len(places), number % 6 + 1)))
    decoder = codecs.getincrementaldecoder("utf-8")()
    edges = [0, *cuts, len(data)]
    return [decoder.decode(data[start:end]) for start, end in pairwise(edges)]


def read(classifier: Classifier, raw: str, cut: Callable[[str], Iterable[str]] = lambda text: (text,)) -> Reply:
    """The folded answer; fails when a character of ``raw`` is lost, added or moved."""
    outputs: list[Output] = []
    for part in CONTROL.split(raw):
        is_control = CONTROL.fullmatch(part) is not None
        for piece in (part,) if is_control else cut(part):
            outputs += classifier.push(piece, special=is_control)
    outputs += classifier.flush()
    assert "".join(output.text for output in outputs if isinstance(output, Piece)) == raw
    reply = Reply()
    reply.add(outputs)
    return reply


def comparable(reply: Reply) -> tuple[Any, ...]:
    """What must not depend on the cut: all but ids that were made up."""
    calls = [(call.index, call.name, call.arguments) for call in reply.calls]
    return reply.text, reply.reasoning, calls, [(error.reason, error.name, error.message) for error in reply.errors]


def classified(row: Row, form: ReplyFormat, cut: Callable[[str], Iterable[str]] = lambda text: (text,)) -> Reply:
    classifier = Classifier(
        form, ToolPolicy(), tools=declared(row), prompt_tail=prompt_tail(row, form), continues=prefill(row)[2]
    )
    return read(classifier, row["raw"], cut)


def differences(row: Row, reply: Reply) -> list[str]:
    """What is not as the row expects; white space at the ends aside."""
    expected, found = row["expected"], []
    text, reasoning, _ = prefill(row)
    if "content" in expected and expected["content"].strip() != (text + reply.text).strip():
        found.append(f"content {reply.text!r}")
    if expected.get("reasoning", "").strip() != (reasoning + reply.reasoning).strip() and (
        "reasoning" in expected and (expected["reasoning"] or not reasoning)
    ):
        found.append(f"reasoning {reply.reasoning!r}")
    calls = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    wanted = [(call["name"], call["arguments"]) for call in expected.get("tool_calls") or []]
    if "arguments_subset" in row.get("flags", ()):
        calls = [
            (name, {key: arguments[key] for key in arguments if key in wish})
            for (name, arguments), (_, wish) in zip(calls, wanted, strict=False)
        ]
    if "tool_calls" in expected and calls != wanted:
        found.append(f"calls {calls} {reply.errors}")
    for call, wish in zip(reply.calls, expected.get("tool_calls") or [], strict=False):
        if "id" in wish and call.id != wish["id"]:
            found.append(f"id {call.id}")
    return found
