"""Which chat template wins, and what is no template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from troth.artifact.template_source import (
    MAX_TEMPLATE_BYTES,
    TemplateSource,
    template_from_files,
    template_from_gguf,
    template_from_json,
)
from troth.errors import ModelLoadError

PATH = Path("folder/tokenizer_config.json")


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_template_from_json_is_none_when_there_is_no_template(value: Any) -> None:
    assert template_from_json(value, PATH) is None


def test_template_from_json_takes_a_string_a_list_and_an_object() -> None:
    origin = "tokenizer_config.json"
    assert template_from_json("T", PATH) == TemplateSource(source="T", origin=origin, named={})
    pairs = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
    expected = TemplateSource(source="D", origin=origin, named={"tool_use": "U"})
    assert template_from_json(pairs, PATH) == expected
    assert template_from_json({"tool_use": "U", "default": "D"}, PATH) == expected


def test_template_from_json_says_which_one_stands_in_when_none_is_the_default() -> None:
    template = template_from_json({"rag": "R", "tool_use": "U"}, PATH)
    assert template == TemplateSource(source="R", origin="tokenizer_config.json (rag)", named={"tool_use": "U"})


def test_template_from_files_keeps_further_templates_by_name() -> None:
    template = template_from_files({"rag": "R", "default": "D"}, Path("m/chat_template.jinja"))
    assert template == TemplateSource(source="D", origin="chat_template.jinja", named={"rag": "R"})


def test_template_from_gguf_reads_the_default_and_named_keys() -> None:
    metadata = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "U", "other": 1}
    expected = TemplateSource(source="D", origin="tokenizer.chat_template", named={"tool_use": "U"})
    assert template_from_gguf(metadata, Path("m.gguf")) == expected
    assert template_from_gguf({"other": 1}, Path("m.gguf")) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "7 is no template"),
        (["text"], "is no template"),
        ([{"name": "default"}], "a NoneType, not a string"),
        ([{"template": "T"}], "None names a template"),
        ({"": "T"}, "'' names a template"),
        ({"n" * 129: "T"}, "names a template"),
        ({"default": {"deep": 1}}, "a dict, not a string"),
        ("\ud800", "not UTF-8"),
        ("é" * (MAX_TEMPLATE_BYTES // 2 + 1), f"{MAX_TEMPLATE_BYTES + 2} bytes long"),
        ({str(i): "T" for i in range(33)}, "33 templates"),
    ],
)
def test_template_from_json_refuses_what_is_no_template(value: Any, words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        template_from_json(value, PATH)
    assert words in str(caught.value)
    assert (caught.value.path, caught.value.field) == (str(PATH), "chat_template")


def test_template_from_gguf_refuses_bytes_that_are_no_text() -> None:
    metadata = {"tokenizer.chat_template": b"\xff".decode("utf-8", "surrogateescape")}
    with pytest.raises(ModelLoadError, match="not UTF-8"):
        template_from_gguf(metadata, Path("m.gguf"))
    with pytest.raises(ModelLoadError, match="a int, not a string"):
        template_from_gguf({"tokenizer.chat_template": 5}, Path("m.gguf"))
