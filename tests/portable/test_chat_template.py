"""The template dialect: what Hugging Face's templates use, and the published renders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from troth.errors import ModelLoadError, RequestError
from troth.text.chat_template import MAX_SOURCE_BYTES, ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]
NOON = datetime(2026, 2, 3, 12, 0, 0)


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, **{"bos_token": None, "eos_token": None, "now": lambda: NOON} | options)


def render(source: str, messages: Any = HELLO, **options: Any) -> str:
    return template(source).render(messages, **options)


def test_chat_template_trims_blocks_and_strips_before_them() -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    assert render(source) == "Hello\n"


def test_chat_template_has_loop_controls() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
    )
    assert render(source + "{% endfor %}") == "023"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("tojson", '{"b": "é<>&\'", "a": [1, true, null]}'),
        ("tojson(ensure_ascii=true)", '{"b": "\\u00e9<>&\'", "a": [1, true, null]}'),
        ("tojson(sort_keys=true)", '{"a": [1, true, null], "b": "é<>&\'"}'),
        ("tojson(separators=(',', ':'))", '{"b":"é<>&\'","a":[1,true,null]}'),
        ("tojson(indent=2)", '{\n  "b": "é<>&\'",\n  "a": [\n    1,\n    true,\n    null\n  ]\n}'),
        ("tojson(indent='\t')", '{\n\t"b": "é<>&\'",\n\t"a": [\n\t\t1,\n\t\ttrue,\n\t\tnull\n\t]\n}'),
    ],
)
def test_chat_template_tojson_is_plain_json(call: str, expected: str) -> None:
    tools = [{"b": "é<>&'", "a": [1, True, None]}]
    assert render(f"{{{{ tools[0] | {call} }}}}", tools=tools) == expected


def test_chat_template_strftime_now_reads_the_given_clock() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "03 Feb 2026"


def test_chat_template_generation_block_is_a_scope() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}[{{ x }}]{% endgeneration %}{{ x }}"
    assert render(source) == "[2]1"


def test_chat_template_namespace_keeps_values_across_loops() -> None:
    source = "{% set ns = namespace(n=0) %}{% for m in [1, 2, 3] %}{% set ns.n = ns.n + m %}{% endfor %}{{ ns.n }}"
    assert render(source) == "6"
    assert render("{{ namespace(a=1).missing is defined }}") == "False"


def test_chat_template_may_change_a_list_of_its_own_and_no_other() -> None:
    """Kimi K2's template keeps the ids of open calls so."""
    source = "{% set ns = namespace(l=[]) %}{% for i in [1, 2, 3] %}{% set _ = ns.l.append(i) %}{% endfor %}"
    assert render(source + "{{ ns.l.pop(0) }}{{ ns.l | join }}{{ ns.l | tojson }}") == "123[2, 3]"
    with pytest.raises(RequestError, match="append"):
        render("{% set _ = messages.append(1) %}")
    with pytest.raises(RequestError, match="extend"):
        render("{% set l = [1] %}{% set _ = l.extend(l) %}")


@pytest.mark.parametrize("name", ["tools", "enable_thinking", "bos_token", "eos_token"])
def test_chat_template_names_that_are_not_given_are_undefined(name: str) -> None:
    assert render(f"{{{{ {name} is defined }}}}") == "False"


def test_chat_template_sees_what_is_given() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ tools[0].name }}{{ enable_thinking }}{{ eos_token }}"
    chat = template(source, bos_token="<s>", eos_token="</s>")
    assert chat.render(HELLO, tools=[{"name": "f"}], variables={"enable_thinking": False}) == "<s>HellofFalse</s>"


def test_chat_template_variables_do_not_replace_the_conversation() -> None:
    source = "{{ messages[0].content }} {{ add_generation_prompt }}"
    hostile = {"messages": [], "add_generation_prompt": True}
    assert render(source, variables=hostile, add_generation_prompt=False) == "Hello False"


def test_chat_template_raise_exception_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ messages[0]['x' * 3].y }}", "xxx"),
        ("{{ '%d' % 'x' }}", "%d"),
        ("{{ '%(a)s %s' | format(1, a=2) }}", "format"),
        ("{% include 'other' %}", "loader"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.x }}", "__class__"),
        ("{{ tools | tojson }}", "Undefined"),
        ("{% set _ = raise_exception() %}", "message"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "deep"),
    ],
)
def test_chat_template_fault_while_rendering_is_a_request_error(source: str, said: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        render(source)
    assert said in str(caught.value)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ 'a }}", "{% for x in y %}", "{{ x | no_such_filter }}", "{% break %}", "{{ " + "(" * 5000 + " }}"],
)
def test_chat_template_that_is_none_fails_to_load(source: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        template(source, path="model/chat_template.jinja")
    assert caught.value.path == "model/chat_template.jinja"


def test_chat_template_error_names_the_line() -> None:
    with pytest.raises(ModelLoadError, match="line 3"):
        template("a\nb\n{% if %}")


def test_chat_template_source_has_a_limit() -> None:
    assert template(" " * MAX_SOURCE_BYTES).render(HELLO) == " " * MAX_SOURCE_BYTES
    with pytest.raises(ModelLoadError, match="1048577 bytes"):
        template(" " * (MAX_SOURCE_BYTES + 1))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'x' ~ 1 ~ none }}", "x1None"),
        ("{{ messages[0:1] | length }}", "1"),
        ("{{ '%s-%02d' | format('a', 7) }}{{ '%(k)s' | format(k=1) }}", "a-071"),
        ("{{ '%s-%02d' % ('a', 7) }}", "a-07"),
        ("{{ '{}-{:>3}'.format('a', 7) }}", "a-  7"),
        ("{{ '{a}'.format_map({'a': 3}) }}", "3"),
        ("{{ ', '.join(messages | map(attribute='role')) }}", "user"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        (
            "{{ 'a-b'.replace('-', '+') }}{{ 'a-b' | replace('-', '+') }}{{ 'a' | replace(old='a', new='b') }}",
            "a+ba+bb",
        ),
        ("{{ 'x\ny' | indent(2) }}|{{ 'x\ny' | indent('--', true) }}", "x\n  y|--x\n--y"),
        ("{{ [1, 2, 3] | sum }}{{ [[1], [2]] | sum(start=[]) }}", "6[1, 2]"),
        ("{{ 'ab' * 3 }}{{ 3 * 'ab' }}{{ [1] * 2 }}{{ -1 * 'ab' }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 2.5 * 2 }}", None),
        ("{{ 'a' | center(5) }}|{{ 'a'.ljust(3) }}|{{ '7'.zfill(3) }}|{{ 'a\tb'.expandtabs(4) }}", None),
        ("{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}", "[[1, 2], [3]][[1, 2], [3]]"),
        ("{{ [3, 1, 2] | sort | join }}{{ {'b': 1, 'a': 2} | dictsort }}", "123[('a', 2), ('b', 1)]"),
        ("{% for i in range(5) if i is odd %}{{ i }}{{ '' if loop.last else ',' }}{% else %}none{% endfor %}", "1,3"),
        ("{% for i in [1, 1, 2] %}{{ loop.changed(i) }}{% endfor %}", "TrueFalseTrue"),
        ("{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}in{% endcall %}", "<1in>"),
        ("{% set text %}a{{ 1 }}{% endset %}{{ text | upper }}{% filter upper %}b{% endfilter %}", "A1B"),
        ("{{ ['a', 'b'].index('b') }}{{ 'aXbX'.count('X') }}{{ 'a' in 'abc' }}{{ 1 == 1.0 }}", "12TrueTrue"),
        ("{{ ('<b>' | safe) + '<' }}{{ ('<b>' | safe) ~ '<' }}", "<b>&lt;<b><"),
        ("{{ dict(a=1).items() | list }}{{ cycler('x').next() }}", "[('a', 1)]x"),
        ("{{ -5 | abs }}{{ not true }}{{ 3 > 2 > 1 }}{{ 1 if false }}", "5FalseTrue"),
    ],
)
def test_chat_template_meter_changes_no_result(source: str, expected: str | None) -> None:
    """The metered environment renders what plain Jinja does."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    result = render(source)
    assert result == plain.from_string(source).render(messages=HELLO)
    assert expected is None or result == expected


def test_chat_template_renders_in_several_threads() -> None:
    chat = template("{% for m in messages %}{{ m.content }}{% endfor %}")
    chats = [[{"role": "user", "content": f"{i}." * 50}] * 20 for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(chat.render, chats))
    assert texts == [f"{i}." * 1000 for i in range(40)]
