"""Templates that try to hang, to eat memory or to get out: every one ends in an error, soon and small."""

from __future__ import annotations

from typing import Any

import pytest

from troth.errors import RequestError, TrothError
from troth.text.chat_template import ChatTemplate
from troth.text.template_budget import STEPS_PER_MESSAGE

BIG = "{% set big = 'a' * 100000 %}"
GROW = "{% set ns = namespace(x='aaaaaaaa', y='bbbbbbbb', l=[1], m=[1]) %}{% for i in range(99) %}"
NEST = GROW + "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}"

HANGS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "wide body": "{% for a in range(99999) %}" + "{{ a }}" * 500 + "{% endfor %}",
    "macro tree": "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "call blocks": "{% macro f() %}{{ caller() }}{% endmacro %}{% for a in range(99999) %}{% call f() %}"
    + "{% for b in range(9999) %}{% endfor %}{% endcall %}{% endfor %}",
    "recursive loop": "{% for a in [[1, 2]] recursive %}{{ loop([[1, 2], [1, 2]]) }}{% endfor %}",
    "comparing": BIG
    + "{% set same = big[1:] + 'a' %}{% for i in range(99999) %}{% if same == big %}{% endif %}{% endfor %}",
    "searching": BIG + "{% for i in range(99999) %}{% if 'b' in big %}{% endif %}{% endfor %}",
    "slicing": BIG + "{% for i in range(99999) %}{% set y = big[1:] %}{% endfor %}",
    "counting": BIG + "{% for i in range(99999) %}{% set y = big.count('b') %}{% endfor %}",
    "list search": BIG
    + "{% set l = [big[1:]] * 99 %}{% for i in range(99999) %}{% set y = l.count(big) %}{% endfor %}",
    "lazy chain": "{% for i in range(99999) %}{% set x = messages * 999 | map(attribute='role') | list %}{% endfor %}",
    "lazy filters": "{% for i in range(999) %}{% set x = range(99999) | select | reject('odd') | list %}{% endfor %}",
    "nested equality": NEST + "{{ ns.l == ns.m }}",
    "nested test": NEST + "{{ [ns.l] | select('eq', ns.m) | list }}",
    "nested changed": NEST + "{% for i in [1, 2] %}{{ loop.changed(ns.l if i == 1 else ns.m) }}{% endfor %}",
    "sorting": BIG + "{% set same = big[1:] + 'a' %}{{ ([big, same] * 9999) | sort | length }}",
    "adding lists": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "adding attributes": "{{ messages | sum('role', []) }}",
    "big power": "{{ (10 ** 1000) ** 1000 }}",
    "negative power": "{{ (10 ** 1000) ** -1000 }}",
    "big product": "{% set ns = namespace(x=2) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "big sum": "{% set ns = namespace(x=2) %}{% for i in range(99999) %}{% for j in range(9999) %}"
    + "{% set ns.x = ns.x + ns.x %}{% endfor %}{% endfor %}",
    "meter turned back": "{{ -10000000000 | _turn }}{% for a in range(99999) %}{{ a }}{% endfor %}",
}
EATS = {
    "repeated text": "{{ 'a' * 10000000000 }}",
    "repeated from the left": "{{ 10000000000 * 'a' }}",
    "repeated list": "{% set x = [1] * 1000000000 %}",
    "doubled by +": GROW + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled by ~": GROW + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled list": GROW + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "doubled block": GROW + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "nested output": NEST + "{{ ns.l }}",
    "nested json": NEST + "{{ ns.l | tojson }}",
    "nested string": NEST + "{{ ns.l | string }}",
    "nested ~": NEST + "{{ ns.l ~ '' }}",
    "nested format": NEST + "{{ '%s' % [ns.l] }}",
    "nested argument": NEST + "{{ ''.join([ns.l]) }}",
    "many references": BIG + "{{ [big] * 99999 }}",
    "joined references": BIG + "{{ ([big] * 99999) | join }}",
    "joined lazily": BIG + "{{ ([{'a': big}] * 99999) | map(attribute='a') | join }}",
    "joined by text": BIG + "{{ big.join(big) }}",
    "joined by filter": BIG + "{{ big | join(big) }}",
    "joined generator": BIG + "{{ big.join(range(99999) | map('string')) }}",
    "replaced": BIG + "{{ big.replace('a', big) }}",
    "replaced by filter": BIG + "{{ big | replace('a', big) }}",
    "replaced nothing": BIG + "{{ big.replace('', big) }}",
    "padded": "{{ 'a' | center(1000000000) }}",
    "padded by method": "{{ 'a'.ljust(1000000000) }}",
    "zero filled": "{{ 'a'.zfill(1000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "format width": "{{ '{:>1000000000}'.format('x') }}",
    "format nested width": "{{ '{:{}}'.format('x', '>1000000000') }}",
    "format item": "{{ '{:>1000000000}'['format']('x') }}",
    "format kept": "{% set f = '{:>1000000000}'.format %}{{ f('x') }}",
    "format many": BIG + "{{ ('{0}' * 99999).format(big) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "indented": "{{ ('x\n' * 99999) | indent(1000000) }}",
    "indented by text": BIG + "{{ ('x\n' * 99999) | indent(big) }}",
    "json indent": "{{ messages | tojson(indent=1000000000) }}",
    "json separators": BIG + "{{ messages | tojson(separators=(big, big)) }}",
    "json depth": "{% set ns = namespace(l=range(9999) | list) %}{% for i in range(800) %}{% set ns.l = [ns.l] %}"
    + "{% endfor %}{{ ns.l | tojson(indent=16) }}",
    "batches": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "slices": "{{ [1] | slice(1000000000, 'x') | list | length }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "range": "{{ range(10000000) | list | length }}",
    "constant": "{% autoescape 'a' | center(1000000000) %}{% endautoescape %}",
    "own list": "{% set l = [] %}{% for i in range(99999) %}{% set _ = l.append(l[:]) %}{% endfor %}",
    "own list in itself": "{% set l = [1] %}{% set _ = l.append(l) %}{% set _ = l.append(l) %}{{ l | string }}",
    "own lists, nested": "{% set l = [1] %}{% for i in range(99) %}{% set _ = l.append([l, l]) %}{% endfor %}{{ l }}",
    "time": "{{ strftime_now('%c' * 10000) }}",
    "translated": "{{ 'a'.translate({97: 'b'}) }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
}
ESCAPES = {
    "class": "{{ ''.__class__ }}",
    "mro": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "namespace": "{{ namespace(a=1).__class__.x }}",
    "format field": "{{ '{0.__class__}'.format(1) }}",
    "attr filter": "{{ (messages | attr('__class__')).x }}",
    "import": "{% import '/etc/passwd' as x %}",
    "deep imports": "{% import 'a' as x %}" * 5000,
    "deep includes": "{% include ['a', 'b'] ignore missing %}" * 1000,
    "inheritance": "{% extends 'base' %}{% block a %}{{ super() }}{% endblock %}",
    "own list": "{{ [1].__class__ }}{{ [1].append.__self__ }}{{ [1].extend([2]) }}",
    "mutation": "{{ messages.clear() }}",
    "dropped filter": "{% if false %}{{ 1 | random }}{% endif %}{{ [1] | map('random') | list }}",
}


def render(source: str, **options: Any) -> str:
    return ChatTemplate(source, bos_token=None, eos_token=None, **options).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("source", [*HANGS.values(), *EATS.values()], ids=[*HANGS, *EATS])
def test_chat_template_work_is_bounded(source: str) -> None:
    """A small budget makes the test quick; the bound holds for any, as all work is charged before it is done."""
    with pytest.raises(RequestError) as caught:
        render(source, max_steps=1_000_000)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES.keys())
def test_chat_template_does_not_leave_its_sandbox(source: str) -> None:
    try:
        leaked = render(source)
    except TrothError:
        leaked = ""
    assert leaked == ""  # what is out of reach is undefined, and undefined is written as nothing


def test_chat_template_budget_grows_with_the_conversation() -> None:
    source = "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}"
    chat = ChatTemplate(source, bos_token=None, eos_token=None, max_steps=0)
    messages = [{"role": "user", "content": ["x" * 1000, {"more": "y"}]}]
    assert chat.render(messages) == "x" * 1000 + "{'more': 'y'}"
    endless = ChatTemplate(HANGS["loops"], bos_token=None, eos_token=None, max_steps=0)
    with pytest.raises(RequestError, match="too much work"):
        endless.render(messages * (1_000_000 // STEPS_PER_MESSAGE))


def test_chat_template_budget_is_whole_again_for_the_next_render() -> None:
    chat = ChatTemplate("{% for i in range(n) %}{% endfor %}ok", bos_token=None, eos_token=None, max_steps=100_000)
    with pytest.raises(RequestError):
        chat.render([], variables={"n": 90_000})
    assert chat.render([], variables={"n": 5_000}) == "ok"
    assert chat.render([], variables={"n": 5_000}) == "ok"
