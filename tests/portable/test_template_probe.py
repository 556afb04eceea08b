"""What a template can do is proved by rendering it: small templates that can or cannot, then all published ones."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.probe_records import GOLDEN, probe_rows
from tests.shared_data import ROOT, shared
from troth.contracts.capabilities import TemplateCapabilities
from troth.contracts.tools import CallForm
from troth.text import probe_trial
from troth.text.chat_renderer import ChatRenderer
from troth.text.chat_template import ChatTemplate
from troth.text.probe_formats import RegistryReader
from troth.text.template_probe import Probe, probe_template

TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
)


def probe(source: str, tool_source: str | None = None, declaration: CallForm | None = None) -> Probe:
    def compiled(text: str) -> ChatTemplate:
        return ChatTemplate(text, bos_token="<s>", eos_token="</s>")

    renderer = ChatRenderer(compiled(source), tool_template=compiled(tool_source) if tool_source else None)
    return probe_template(renderer, RegistryReader(), declaration)


def proved(source: str) -> TemplateCapabilities:
    return probe(source).capabilities


def test_probe_chatml_chats_and_nothing_more() -> None:
    found = proved(TURN + OPENING)
    assert (found.chat, found.history, found.system) == (True, True, "anywhere")
    assert not found.tools
    assert (found.tool_format, found.reasoning, found.thinking, found.effort, found.media) == (None,) * 5
    assert (found.starts_in_reasoning, found.translation, found.tool_results) == (False, False, False)


@pytest.mark.parametrize(
    "source",
    ["", "fixed text", "{{ raise_exception('no') }}", "{{ messages[0].content | length }}", "{{ missing.thing }}"],
)
def test_probe_chat_needs_the_users_text(source: str) -> None:
    found = proved(source)
    assert found == TemplateCapabilities(evidence=found.evidence)
    assert [item.holds for item in found.evidence if item.capability == "chat"] == [False]


@pytest.mark.parametrize(
    ("source", "deaf"),
    [
        ("fixed text", True),
        ("{{ messages[0].content | length }}", True),
        ("{{ raise_exception('no') }}", False),
        ("{{ messages[0].content }}", False),
    ],
)
def test_probe_tells_templates_that_hear_nobody_from_those_that_refuse(source: str, deaf: bool) -> None:
    """A template may fail on these conversations alone; then requests say for themselves how they fail."""
    assert probe(source).hears_nobody == deaf


def test_probe_content_as_parts_where_a_string_is_not_read() -> None:
    source = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
    found = probe(source)
    assert found.capabilities.chat
    assert found.form.content == "parts"


@pytest.mark.parametrize(
    ("loop", "place"),
    [
        ("[{{ m.role }}]{{ m.content }}", "anywhere"),
        ("{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}{{ m }}", "leading"),
        ("{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}", "leading"),
        ("{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}", "none"),
        ("<turn>{{ m.content }}", "none"),
        ("{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}<turn>{{ m.content }}", "none"),
    ],
    ids=["anywhere", "late refused", "late dropped", "dropped", "as a user", "refused"],
)
def test_probe_system_is_where_it_is_heard_as_one(loop: str, place: str) -> None:
    found = probe("{% for m in messages %}" + loop + "{% endfor %}")
    assert found.capabilities.system == found.form.system == place


def test_probe_tools_need_declarations_calls_and_results() -> None:
    found = proved(TOOLS + CALLS + OPENING)
    assert found.tools
    assert found.tool_format == "hermes"
    assert found.tool_history
    assert found.tool_results
    assert found.parallel_tool_calls
    assert not proved(CALLS + OPENING).tools  # nothing declares them
    assert proved(CALLS + OPENING).tool_format == "hermes"
    assert not proved(TOOLS + TURN + OPENING).tools  # nothing says how they are called


@pytest.mark.parametrize(
    ("declaring", "holds"),
    [
        ("{{ tools | tojson }}", True),
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}", False),
        ("{{ tools[0] | tojson if tools else '' }}", False),
        ("{{ '' if not tools else 'qvtoolone qvplace qvdays qvtooltwo qvtopic qvlimit' }}", False),
    ],
    ids=["all", "names only", "first only", "whatever is given"],
)
def test_probe_declarations_arrive_whole_and_alone(declaring: str, holds: bool) -> None:
    source = ("" if "tools or" in declaring else "{% if tools %}") + declaring
    source += ("" if "tools or" in declaring else "{% endif %}") + TURN
    assert proved(source).tool_declarations == holds


def test_probe_declarations_in_the_form_a_template_takes() -> None:
    flat = "{% for t in tools or [] %}{{ t.name ~ t.parameters }}{% endfor %}"
    assert probe(flat + TURN).form.declarations == "flat"
    inside_system = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{{ tools | tojson if tools }}"
    inside_system += "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    found = probe(inside_system)
    assert found.capabilities.tool_declarations
    assert found.form.system_with_tools
    demanding = (
        "{% for t in tools or [] %}{{ t.function.name }}{% for n, p in t.function.parameters.properties.items() %}"
    )
    demanding += "{{ n + p.description + p.type }}{% endfor %}{% endfor %}"
    assert probe(demanding + TURN).form.every_field
    assert not probe(TOOLS + TURN).form.every_field


def test_probe_call_form_is_the_one_that_reads_back() -> None:
    as_text = CALLS.replace("c.function.arguments | tojson", "c.function.arguments")
    assert probe(TOOLS + as_text).form.arguments == "text"
    fussy = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    fussy += "{{ raise_exception('nine') }}{% endif %}{% endfor %}{% endfor %}"
    found = probe(TOOLS + fussy + CALLS)
    assert found.form.short_call_ids
    assert found.capabilities.tool_format == "hermes"


def test_probe_call_that_no_format_reads_leaves_tools_off_and_chat_on() -> None:
    found = probe(TOOLS + CALLS.replace("<tool_call>", "I call: ").replace("</tool_call>", "."))
    assert found.capabilities.chat
    assert found.capabilities.tool_declarations
    assert not found.capabilities.tools
    assert len(found.replies) == 3
    said = [item.shown for item in found.evidence if item.capability == "tool_format"]
    assert any("no known format reads a past call back" in text for text in said)


OWN = CALLS.replace("<tool_call>", "<my_own>").replace("</tool_call>", "</my_own>")


def test_probe_format_is_derived_from_past_calls_that_no_format_reads() -> None:
    found = probe(TOOLS + OWN).capabilities
    assert (found.tools, found.tool_format, found.tool_history, found.parallel_tool_calls) == (
        True,
        "derived",
    ) + (True,) * 2
    assert found.call_form is not None
    assert found.call_form.opens == ("<my_own>",)
    assert proved(OWN).tool_format is None  # nothing declares tools
    assert proved(TOOLS + CALLS).call_form is None


def test_probe_format_that_the_model_declares_must_read_the_calls_it_writes() -> None:
    right, wrong = (CallForm(opens=(f"<{word}>",), closes=(f"</{word}>",)) for word in ("my_own", "other"))
    assert probe(TOOLS + OWN, declaration=right).capabilities.tool_format == "declared"
    assert probe(TOOLS + OWN, declaration=wrong).capabilities.tool_format == "derived"
    assert probe(TOOLS + CALLS, declaration=wrong).capabilities.tool_format == "hermes"


def test_probe_format_that_the_model_declares_stands_for_itself_where_no_calls_are_written() -> None:
    form = CallForm(opens=("<my_own>",), closes=("</my_own>",))
    found = probe(TOOLS + TURN, declaration=form)
    assert (found.capabilities.tools, found.capabilities.call_form, found.capabilities.tool_history) == (
        True,
        form,
        False,
    )
    assert (found.form.written_calls, found.form.call_form) == ("declared", form)


def test_probe_past_calls_are_written_into_the_content_where_the_template_writes_none() -> None:
    taught = TOOLS.replace("</tools>", '</tools><tool_call>{"name": <name>, "arguments": <object>}</tool_call>')
    only_users = TURN.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
    found = probe(taught + only_users)
    assert (found.capabilities.tool_format, found.capabilities.tool_history) == ("hermes", False)
    assert (found.form.written_calls, found.form.results) == ("hermes", "user")
    assert len(found.replies) == 3
    dropped = TURN.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}")
    assert probe(taught + dropped).form.written_calls is None


def test_probe_format_from_the_instructions_where_past_calls_are_not_written() -> None:
    taught = '{% if tools %}Call: <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    found = proved(TOOLS + taught + "{% endif %}" + TURN)
    assert found.tool_format == "hermes"
    assert not found.tool_history
    always = taught.replace("{% if tools %}", "")
    assert proved(TOOLS + always + TURN).tool_format is None  # said without tools too: not about them


def test_probe_results_are_told_apart_from_users() -> None:
    as_user = CALLS.replace("{{ m.role }}", "{{ 'user' if m.role == 'tool' else m.role }}")
    assert not proved(TOOLS + as_user).tool_results
    listed = CALLS.replace(
        "{{ m.content }}", "{% if m.role == 'tool' %}{{ m.content[0] }}{% else %}{{ m.content }}{% endif %}"
    )
    found = probe(TOOLS + listed)
    assert found.capabilities.tool_results
    assert found.form.results == "list"


def test_probe_one_call_at_a_time_is_seen() -> None:
    single = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
    found = proved(TOOLS + single + "{% endif %}{% endfor %}" + CALLS)
    assert found.tools
    assert not found.parallel_tool_calls


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.FIELD and KEPT %}<think>\n{{ m.FIELD }}\n</think>\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", "tool_plan"])
def test_probe_reasoning_by_the_field_a_template_reads(field: str) -> None:
    found = probe(THINKS.replace("FIELD", field).replace("KEPT", "true") + OPENING)
    assert found.form.reasoning == field
    reasoning = found.capabilities.reasoning
    assert reasoning is not None
    assert (reasoning.markers, reasoning.open, reasoning.close) == ("think", "<think>", "</think>")
    assert reasoning.kept == "all"


def test_probe_reasoning_without_markers_is_none() -> None:
    assert proved("{% for m in messages %}{{ m.reasoning_content }}{{ m.content }};{% endfor %}").reasoning is None


def test_probe_reasoning_of_the_last_turn_alone_is_not_kept() -> None:
    found = proved(THINKS.replace("FIELD", "reasoning_content").replace("KEPT", "loop.last") + OPENING)
    assert found.reasoning is not None
    assert found.reasoning.kept == "none"


def test_probe_reasoning_that_is_cut_out_of_past_answers_is_known_by_its_markers() -> None:
    cutting = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
    found = proved(TURN.replace("{{ m.content }}", cutting) + OPENING)
    assert found.reasoning is not None
    assert (found.reasoning.markers, found.reasoning.kept) == ("think", "none")


def test_probe_calls_that_are_written_only_beside_null_content() -> None:
    """DeepSeek V3's template."""
    found = probe(TOOLS + CALLS.replace("m.tool_calls or []", "((m.tool_calls or []) if m.content is none else [])"))
    assert found.form.null_content
    assert found.capabilities.tool_format == "hermes"


SWITCHED = {
    "opens": ("{% if VAR %}<think>\n{% endif %}", "span", "off"),
    "empties": ("{% if VAR is defined and not VAR %}<think>\n\n</think>\n\n{% endif %}", "span", "on"),
    "says": ("{% if VAR is defined %}{{ 'Think.' if VAR else 'Be quick.' }}{% endif %}", "instruction", "auto"),
}


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking", "reasoning"])
@pytest.mark.parametrize(("tail", "kind", "default"), SWITCHED.values(), ids=SWITCHED.keys())
def test_probe_thinking_switch_is_the_variable_that_makes_a_difference(
    variable: str, tail: str, kind: str, default: str
) -> None:
    thinking = proved(TURN + OPENING + tail.replace("VAR", variable)).thinking
    assert thinking is not None
    assert (thinking.on, thinking.off) == ({variable: True}, {variable: False})
    assert (thinking.kind, thinking.default) == (kind, default)


def test_probe_start_inside_reasoning_is_read_off_the_prompt() -> None:
    assert proved(TURN + OPENING + "<think>\n").starts_in_reasoning
    assert not proved(TURN + OPENING + "<think>\n\n</think>").starts_in_reasoning
    assert not proved(TURN + OPENING).starts_in_reasoning


def test_probe_effort_levels_are_those_that_differ() -> None:
    echoed = proved(TURN + "Effort: {{ reasoning_effort }}")
    assert echoed.effort is not None
    assert echoed.effort.levels == ("low", "medium", "high")
    assert echoed.thinking is None  # any word changes the prompt; that one of them switches thinking is not shown
    chosen = proved(TURN + "{% if thinking_effort == 'max' %}Think hard.{% endif %}").effort
    assert chosen is not None
    assert (chosen.variable, chosen.levels) == ("thinking_effort", ("high", "max"))


MEDIA = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}PART{% endfor %}{% endif %};{% endfor %}"
)


def test_probe_media_leave_a_placeholder_each_in_its_place() -> None:
    found = proved(MEDIA.replace("PART", "{{ p.text if p.type == 'text' else '<|image|>' if p.type == 'image' }}"))
    assert found.media == {"image": "<|image|>"}
    counted = "{{ p.text if p.type == 'text' }}{% if loop.last and m.content | length > 2 %}<|image|>{% endif %}"
    assert proved(MEDIA.replace("PART", counted)).media is None  # one for all of them, wherever they stood
    assert proved(MEDIA.replace("PART", "{{ p.text or (p | tojson) }}")).media is None  # the part itself is printed


def test_probe_translation_takes_codes_and_hides_them() -> None:
    part = "{{ 'Translate ' ~ p.source_lang_code ~ ' to ' ~ p.target_lang_code ~ ': ' ~ p.text }}"
    found = proved("{% for m in messages %}{% for p in m.content %}" + part + "{% endfor %}{% endfor %}")
    assert found.translation
    assert not proved(TURN).translation


def test_probe_uses_the_tool_template_where_there_is_one() -> None:
    found = probe(TURN + OPENING, TOOLS + CALLS + OPENING).capabilities
    assert found.tools
    assert found.system == "anywhere"
    assert not probe(TURN + OPENING).capabilities.tools


def test_probe_stands_still_in_time() -> None:
    """A clock in the prompt made every variable look like it had an effect."""
    found = proved(TURN + "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}")
    assert (found.thinking, found.effort) == (None, None)


def test_probe_never_reads_the_source() -> None:
    mentions = '{# <tool_call> {"name": 1} </tool_call> enable_thinking <think> tools image #}'
    assert proved(mentions + TURN + OPENING) == proved(TURN + OPENING)


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "grows": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "long": "{{ messages[0].content }}{{ 'a' * 1000000 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "includes": "{% include 'x' %}",
    "imports": "{% import 'x' as y %}" * 100,
    "late loops": TURN
    + "{% if tools %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_probe_of_a_hostile_template_ends_soon(source: str) -> None:
    before = time.process_time()
    found = proved(source)
    assert not found.tools
    assert found.chat == source.startswith("{% for m")
    assert time.process_time() - before < 20  # every render has its budget, and there is a bound on renders


@pytest.mark.parametrize("limit", [1, 10, 40])
def test_probe_renders_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    rendered = []
    render = ChatRenderer.render
    monkeypatch.setattr(ChatRenderer, "render", lambda *args, **named: rendered.append(1) or render(*args, **named))
    monkeypatch.setattr(probe_trial, "MAX_RENDERS", limit)
    found = proved(TOOLS + CALLS.replace("<tool_call>", "I call: ") + OPENING)
    assert len(rendered) == limit
    assert found.chat == (limit > 1)
    assert not found.tools


def published() -> list[Any]:
    index = ROOT / "templates" / "INDEX.json"
    if not index.exists():
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason="shared data templates/ is not here"))]
    return [pytest.param(index, id="all")]


@pytest.mark.parametrize("index", published())
def test_probe_of_published_templates_is_what_was_reviewed(index: Any) -> None:
    """``docs/probes.md`` tells what each family is known to do. Recorded by ``python -m scripts.record_probes``."""
    recorded = {row["template"]: row for row in map(json.loads, GOLDEN.read_text(encoding="utf-8").splitlines())}
    found = {row["template"]: json.loads(json.dumps(row)) for row in probe_rows(index)}
    assert found.keys() == recorded.keys()
    assert [row for name, row in found.items() if row != recorded[name]] == []


def test_probe_records_hold_no_text_of_templates() -> None:
    shared("templates")
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 166
    assert max(map(len, lines)) < 700
    assert not any(mark in line for line in lines for mark in ("<|", "[INST", "{%", "｜"))
