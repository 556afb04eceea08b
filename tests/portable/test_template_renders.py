"""Every published render comes out equal, character by character; what cannot is listed with its reason."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from tests.shared_data import ROOT, shared
from troth.text.chat_renderer import ChatRenderer
from troth.text.chat_template import ChatTemplate
from troth.text.messages import normalise_messages
from troth.text.probe_formats import RegistryReader
from troth.text.template_probe import probe_template

# Templates without a system role: the published render has the system text inside the first user turn, as the renderer
# does it for a form the probe finds. Plain Jinja refuses or drops the message.
FOLDED = {
    "llamacpp/mistralai/Mistral-7B-Instruct-v0.2 (NOTE: Old pre-v1 without a system prompt)",
    "llamacpp/google/gemma-7b-it",
    "llamacpp/OrionStarAI/Orion-14B-Chat",
    "llamacpp/Phi-3-mini",
    "llamacpp/Phi-3-medium",
}
EXCEPTIONS = {
    "hfjs/MadeAgents/Hammer2.1": "made by a JavaScript engine that prints a list as JSON; Jinja prints Python's repr",
    "vllm-rust/deepseek_v32/test_input.json": "made by the model's own encoding code, which puts the system text last; "
    "its template writes the same characters with the system text first",
}
# Made by the model's own encoding code; its template gives the same when told to think.
ENCODED = {"vllm-rust/deepseek_v4/test_input_1.json": "templates/deepseek/llamacpp__deepseek-ai-DeepSeek-V4.jinja"}


def rows() -> list[Any]:
    path = ROOT / "renders" / "renders.jsonl"
    if not path.exists():
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason="shared data renders/ is not here"))]
    return [pytest.param(row, id=row["id"]) for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())]


def compiled(row: dict[str, Any], context: dict[str, Any]) -> ChatTemplate:
    source = shared(row["template_file"]).read_bytes().decode() if row.get("template_file") else row["template"]
    now = datetime.fromisoformat(row["now"])
    named = {name: context.pop(name, None) for name in ("bos_token", "eos_token")}
    return ChatTemplate(source, **named, now=lambda: now)


@pytest.mark.parametrize("row", [row for row in rows() if row.id not in {*FOLDED, *EXCEPTIONS, *ENCODED}])
def test_render_published_comes_out_equal(row: dict[str, Any]) -> None:
    context = dict(row["context"])
    chat = compiled(row, context)
    messages, tools = context.pop("messages"), context.pop("tools", None)
    # Absent there means undefined; here, as in apply_chat_template, it is always true or false.
    asked = [context.pop("add_generation_prompt")] if "add_generation_prompt" in context else [False, True]
    texts = [chat.render(messages, tools=tools, variables=context, add_generation_prompt=asking) for asking in asked]
    assert row["expected"] in texts


@pytest.mark.parametrize("row", [row for row in rows() if row.id in FOLDED or row.id == "absent"])
def test_render_published_comes_out_equal_where_the_system_text_is_folded(row: dict[str, Any]) -> None:
    renderer = ChatRenderer(compiled(row, dict(row["context"])))
    renderer = renderer.with_form(probe_template(renderer, RegistryReader()).form)
    assert renderer.form.system == "none"
    messages = normalise_messages(row["context"]["messages"])
    text = renderer.render(messages, add_generation_prompt=row["context"]["add_generation_prompt"])
    assert text == row["expected"]


@pytest.mark.parametrize("row", [row for row in rows() if row.id in ENCODED or row.id == "absent"])
def test_render_published_comes_out_equal_where_code_made_it(row: dict[str, Any]) -> None:
    """Through the renderer, as a client's messages go: arguments as text, content left out beside calls."""
    source = shared(ENCODED[row["id"]]).read_text(encoding="utf-8")
    begin = row["expected"][: row["expected"].index("You are")]
    renderer = ChatRenderer(ChatTemplate(source, bos_token=begin, eos_token=None))
    messages = normalise_messages(row["context"]["messages"])
    tools = row["context"]["tools"]
    text = renderer.render(messages, tools=tools, add_generation_prompt=False, variables={"thinking": True})
    assert text == row["expected"]


def test_render_published_exceptions_are_those_the_data_marks() -> None:
    """Nothing is left out that plain Jinja was verified on, and no reason outlives its row."""
    shared("renders")
    unverified = {row.id for row in rows() if not row.values[0]["jinja2_verified"]}
    assert unverified == FOLDED | set(EXCEPTIONS) | set(ENCODED)
