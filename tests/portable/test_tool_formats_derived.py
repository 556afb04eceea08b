"""Formats that no module describes: what is derived from renders or declared by a config reads what it should."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.portable.tool_corpus import read
from tests.portable.tool_examples import COMPILED, EXAMPLES, OBJECT
from troth.compose import TextSide
from troth.text.classifier import Classifier, ReplyFormat
from troth.text.defaults import GenerationDefaults
from troth.text.tool_formats import ToolFormat
from troth.text.tool_formats.derived import declared_form, derived_form, format_of

HEAD, TAIL = "<|user|>hi<|assistant|>\n", "<|end|>\n"


def derived(written: str) -> ToolFormat | None:
    """From a template that writes a call of ``f`` as ``written`` says."""
    call = HEAD + written.replace("NAME", "sentinel").replace("OBJECT", '{"k": {"a": [1]}}') + TAIL
    form = derived_form(call, f"{HEAD}Sentence{TAIL}", "sentinel", {"k": {"a": [1]}})
    return None if form is None else format_of(form, "derived")


@pytest.mark.parametrize(
    "written",
    [
        '<call>\n{"name": "NAME", "arguments": OBJECT}\n</call>',
        "<|fn|>NAME<|args|>OBJECT<|done|>",
        "[[NAME(OBJECT)]]",
        "<use tool='NAME'>\nOBJECT\n</use>",
        "<@call>NAME\nOBJECT",
        "<call>NAME {x} OBJECT</call>",
        '<call>[{"function": {"name": "NAME", "arguments": OBJECT}}]</call>',
    ],
)
def test_tool_formats_derived_from_renders_read_what_the_template_writes(written: str) -> None:
    form = derived(written)
    assert form is not None
    raw = "Well. " + written.replace("NAME", "f").replace("OBJECT", OBJECT)
    whole = read(Classifier(ReplyFormat(tools=form), tools=COMPILED), raw)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == [("f", {"city": "Paris", "n": 1})]
    assert whole.text.strip() == "Well."
    for other in ("[1]", "{}"):
        broken = raw.replace(OBJECT, other)
        assert read(Classifier(ReplyFormat(tools=form), tools=COMPILED), broken).text == broken


@pytest.mark.parametrize(
    "name", ["hermes", "mistral", "nemotron2", "granite", "internlm2", "gigachat", "qwen_brackets"]
)
def test_tool_formats_derived_agree_with_the_module_that_describes_the_same(name: str) -> None:
    example = EXAMPLES[name].replace(OBJECT, "OBJECT")
    place = re.search(r"\bf\b", example)
    assert place is not None
    form = derived(example[: place.start()] + "NAME" + example[place.end() :])
    assert form is not None
    reply = read(Classifier(ReplyFormat(tools=form), tools=COMPILED), EXAMPLES[name])
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("f", {"city": "Paris", "n": 1})]


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "NAME", "arguments": OBJECT}',
        "Calling NAME with OBJECT",
        "<call>NAME</call>",
        "<call>NAME k=1</call>",
        "<call>OBJECT NAME</call>",
        "<call>NAME NAME OBJECT</call>",
        "<" + "x" * 200 + ">NAME OBJECT",
        "",
    ],
)
def test_tool_formats_are_not_derived_where_nothing_marks_a_call(written: str) -> None:
    assert derived(written) is None


def declaration(**changes: Any) -> dict[str, Any]:
    calls = {
        "open": "<call>\n",
        "close": "\n</call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }
    return {"fields": {"content": {"content": "text"}, "tool_calls": {**calls, **changes}}}


def test_tool_formats_declared_by_a_config_read_json_between_markers() -> None:
    declared = declared_form(declaration())
    assert declared is not None
    form = format_of(declared, "declared")
    raw = f'a<call>\n{{"name": "f", "arguments": {OBJECT}}}\n</call>b'
    reply = read(Classifier(ReplyFormat(tools=form), tools=COMPILED), raw)
    assert ([call.name for call in reply.calls], reply.text) == (["f"], "ab")


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"fields": []},
        {"version": 2, **declaration()},
        {"fields": {"content": {}}},
        declaration(content="xml-inline"),
        declaration(content_args={"unquoted_keys": True}),
        declaration(transform={"function": {"name": "{name}"}}),
        declaration(open=None),
        declaration(open=" "),
        declaration(close=["</call>", ""]),
    ],
)
def test_tool_formats_are_not_taken_from_declarations_that_need_more_than_markers(declared: dict[str, Any]) -> None:
    assert declared_form(declared) is None


@pytest.mark.parametrize(
    ("config", "opens"),
    [
        ({"response_template": declaration()}, ("<call>",)),
        ({"response_template": "text"}, None),
        ({"chat_template": "x"}, None),
        (None, None),
    ],
)
def test_tool_formats_declared_in_the_files_of_a_model_are_found(
    tmp_path: Path, config: dict[str, Any] | None, opens: tuple[str, ...] | None
) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    artifact: Any = SimpleNamespace(tokenizer_files={} if config is None else {path.name: path})
    tokenizer: Any = None
    found = TextSide(artifact, tokenizer, None, GenerationDefaults.from_config({})).declared_calls
    assert (found.opens if found else None) == opens
