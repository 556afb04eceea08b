"""Forced calls: the pattern that a template's own writing gives away, and the grammar that is made of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.shared_data import shared
from troth.contracts.grammar import Grammar
from troth.contracts.tools import ToolChoice, ToolPolicy, ToolSpec
from troth.errors import CapabilityUnavailable, RequestError
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.call_pattern import Beside, CallPattern, answer_frame, call_pattern
from troth.text.chat_renderer import ChatRenderer
from troth.text.chat_template import ChatTemplate
from troth.text.grammar import GrammarCompiler
from troth.text.probe_formats import RegistryReader
from troth.text.probe_trial import CALL_IDS, FIRST, SECOND, Sample
from troth.text.template_probe import probe_template
from troth.text.tool_formats.notation import CALL_ID, INDEX

A = ToolSpec(name="a", parameters={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
B = ToolSpec(name='b"\\', parameters={"type": "object", "properties": {}, "additionalProperties": False})
HERMES = CallPattern('<tool_call>\n{"name": "', '", "arguments": ', "", "}\n</tool_call>")
ONE, TWO = '<tool_call>\n{"name": "a", "arguments": {"n": 1}}\n</tool_call>', '{"name": "b\\"\\\\", "arguments": {}}'


def hermes(*samples: Sample) -> str:
    calls = (json.dumps({"name": one.name, "arguments": one.arguments}) for one in samples)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def array(*samples: Sample) -> str:
    calls = [{"name": one.name, "arguments": one.arguments} for one in samples]
    return f"[TOOL_CALLS]{json.dumps(calls)}"


def replies(write: Any, before: str = "") -> list[str]:
    return [before + write(FIRST), before + write(SECOND), before + write(FIRST, SECOND)]


def pattern() -> CallPattern:
    found = call_pattern(replies(hermes), "hermes")
    assert found is not None
    return found


def accepts(text: str, policy: ToolPolicy, thought: tuple[str, str] | None = None) -> bool:
    """Whether a text is a whole answer of the policy's grammar."""
    return matches(Grammar(kind="calls", source=pattern().source(policy, ByteTokenizer(), thought)), text)


def matches(grammar: Grammar, text: str) -> bool:
    tokens = ByteTokenizer()
    session = GrammarCompiler(tokens, tokens.vocab_size).compile(grammar).session(tokens.eos_ids)
    for token_id in tokens.encode(text):
        if session.is_complete:
            return False
        session.advance(token_id)
    return session.is_accepting


def policy(mode: Any = "required", name: str | None = None, *, parallel: bool = True) -> ToolPolicy:
    return ToolPolicy(tools=(A, B), choice=ToolChoice(mode=mode, name=name), parallel=parallel)


def test_pattern_is_what_stands_around_names_and_arguments() -> None:
    words = (
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        '}\n</tool_call>\n<tool_call>\n{"name": "',
        "}\n</tool_call>",
    )
    assert pattern() == CallPattern(*words, entries=("<tool_call>",))
    assert pattern().marker == "<tool_call>"


def test_pattern_leaves_out_what_a_template_writes_before_the_call() -> None:
    assert call_pattern(replies(hermes, "<think>\n\n</think>\n\n"), "hermes") == pattern()


def test_pattern_of_an_array_joins_calls_inside_it() -> None:
    found = call_pattern(replies(array), "mistral")
    assert found is not None
    assert (found.before, found.joint, found.after) == ('[TOOL_CALLS][{"name": "', '}, {"name": "', "}]")


@pytest.mark.parametrize(
    "write",
    [
        lambda *samples: "".join(f"<tool_call>{one.name}(x)</tool_call>" for one in samples),
        lambda *samples: "".join(f"<tool_call>{one.name} {one.name} {json.dumps(one.arguments)}" for one in samples),
    ],
    ids=["no object", "two names"],
)
def test_pattern_of_another_way_to_write_calls_is_none(write: Any) -> None:
    assert call_pattern(replies(write), "hermes") is None


def test_pattern_has_a_place_for_an_id() -> None:
    def write(*samples: Sample) -> str:
        calls = [{"name": one.name, "arguments": one.arguments, "id": CALL_IDS[0]} for one in samples]
        return f"[TOOL_CALLS]{json.dumps(calls)}"

    found = call_pattern(replies(write), "mistral")
    assert found is not None
    assert found.after == f', "id": "{CALL_ID}"}}]'
    grammar = Grammar(kind="calls", source=found.source(policy(), ByteTokenizer()))
    assert matches(grammar, '[TOOL_CALLS][{"name": "a", "arguments": {"n": 1}, "id": "a1B2c3D4e"}]')
    assert not matches(grammar, '[TOOL_CALLS][{"name": "a", "arguments": {"n": 1}, "id": ""}]')


def test_pattern_may_have_the_name_behind_the_arguments() -> None:
    def write(*samples: Sample) -> str:
        return "".join(
            f'<tool_call>{{"arguments": {json.dumps(one.arguments)}, "name": "{one.name}"}}' for one in samples
        )

    found = call_pattern(replies(write), "hermes")
    assert found is not None
    assert (found.name_last, found.joint) == (True, "")
    grammar = Grammar(kind="calls", source=found.source(policy(), ByteTokenizer()))
    assert matches(grammar, '<tool_call>{"arguments": {"n": 1}, "name": "a"}')
    assert not matches(grammar, '<tool_call>{"arguments": {"n": 1}, "name": "c"}')


@pytest.mark.parametrize(("found", "name"), [([], "hermes"), (replies(hermes), None), (replies(hermes), "harmony")])
def test_pattern_of_a_model_without_a_format_is_none(found: list[str], name: str | None) -> None:
    assert call_pattern(found, name) is None


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        (ONE, True),
        (f"{ONE}\n<tool_call>\n{TWO}\n</tool_call>", True),
        ("hello", False),
        ("", False),
        (ONE.replace("1", '"x"'), False),
        (ONE.replace('"a"', '"c"'), False),
        (f"<think>x</think>\n\n{ONE}", False),
    ],
)
def test_grammar_allows_calls_of_the_tools_alone(text: str, accepted: bool) -> None:
    assert accepts(text, policy()) is accepted


def test_grammar_of_one_call_allows_no_second() -> None:
    both = f"{ONE}\n{ONE}"
    assert accepts(both, policy())
    assert not accepts(both, policy(parallel=False))
    assert not accepts(both, policy("named", "a"))


def test_grammar_of_a_named_tool_allows_no_other() -> None:
    assert accepts(ONE, policy("named", "a"))
    assert not accepts(ONE, policy("named", B.name))


@pytest.mark.parametrize("thought", ["", "a </thin b\n", "<tool_call>"])
def test_grammar_may_leave_room_for_a_thought(thought: str) -> None:
    marks = ("<think>", "</think>")
    assert accepts(f"<think>{thought}</think>\n\n{ONE}", policy(), marks)
    assert accepts(ONE, policy(), marks)
    assert not accepts(f"<think>{thought}</think>hello", policy(), marks)


def test_grammar_spells_control_tokens_by_id() -> None:
    class Marked(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
            before, found, after = text.partition("<tool_call>")
            return [*before.encode(), *([256] if found else []), *after.encode()]

    source = HERMES.source(policy(), Marked())
    assert '<[256]> "\\n{\\"name\\": \\""' in source


def test_grammar_leaves_out_keywords_that_only_validation_can_check() -> None:
    tool = ToolSpec(name="a", parameters={"type": "object", "not": {"required": ["x"]}})
    assert "not" not in HERMES.source(ToolPolicy(tools=(tool,)), ByteTokenizer())


def test_grammar_of_a_schema_that_leads_nowhere_is_refused() -> None:
    tool = ToolSpec(name="a", parameters={"type": "object", "properties": {"n": {"$ref": "#/$defs/none"}}})
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters"):
        HERMES.source(ToolPolicy(tools=(tool,)), ByteTokenizer())


STRICT = ToolSpec(name="a", parameters={**A.parameters, "additionalProperties": False}, strict=True)  # type: ignore[dict-item]
MARKS = ("<think>", "</think>")


def strict_policy(*, parallel: bool = True) -> ToolPolicy:
    return ToolPolicy(tools=(STRICT, B), parallel=parallel)


def beside(kind: Beside, found: CallPattern | None = None, thought: tuple[str, str] | None = None) -> Grammar:
    """The grammar of calls beside text, or beside a caller's schema."""
    source = (found or pattern()).source(strict_policy(), ByteTokenizer(), thought, beside=kind)
    if kind != "answer":
        return Grammar(kind="calls", source=source)
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    return Grammar(kind="json_schema", source=json.dumps({**schema, "additionalProperties": False}), frame=source)


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("", True),
        ("hello <tool_ call>, {1}", True),
        (f"Wait.\n{ONE}", True),
        (f"{ONE}\n<tool_call>\n{TWO}\n</tool_call>", True),
        (f"{ONE} and {ONE} done", True),
        (ONE.replace("1}}", '"x"}}'), False),
        (ONE.replace("1}}", '1, "m": 2}}'), False),
        (ONE.replace('"a"', '"c"'), False),
        ("a <tool_call> is a tag", False),
        (f"{ONE} <tool_call>", False),
        # Arguments of a tool that is not strict are any object.
        (f"<tool_call>\n{TWO.replace('{}', json.dumps({'free': 1}))}\n</tool_call>", True),
    ],
)
def test_grammar_beside_text_binds_calls_once_they_begin(text: str, accepted: bool) -> None:
    assert matches(beside("text"), text) is accepted


@pytest.mark.parametrize(
    ("text", "accepted"),
    [("<think>a <tool_call> b</think>\n\nhi", True), (f"<think></think>{ONE}", True), ("<think>never closed", False)],
)
def test_grammar_beside_text_leaves_reasoning_alone(text: str, accepted: bool) -> None:
    assert matches(beside("text", thought=MARKS), text) is accepted


@pytest.mark.parametrize(
    ("text", "accepted"),
    [("hi {", True), (ONE[12:-13], True), (ONE[12:-13].replace("1", "true"), False), ('{"x": 1}', False)],
)
def test_grammar_of_bare_calls_binds_an_answer_that_begins_like_one(text: str, accepted: bool) -> None:
    bare = CallPattern('{"name": "', '", "arguments": ', "", "}", entries=("<|python_tag|>",), bare=("{",))
    assert matches(beside("text", bare), text) is accepted


def test_grammar_beside_text_ends_text_at_a_control_token() -> None:
    class Marked(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
            before, found, after = text.partition("<tool_call>")
            return [*before.encode(), *([256] if found else []), *after.encode()]

    tokens = Marked()
    grammar = Grammar(kind="calls", source=pattern().source(strict_policy(), tokens, beside="text"))
    for number, holds in (("1", True), ("true", False)):
        session = GrammarCompiler(tokens, tokens.vocab_size).compile(grammar).session(frozenset())
        for token_id in tokens.encode(f"hi {ONE}".replace("1", number)):
            session.advance(token_id)
        assert session.is_accepting is holds


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('{"x": "y"}', True),
        (ONE, True),
        (f'<think>{ONE}</think>\n\n{{"x": "y"}}', True),
        (f"<think></think>{ONE}", True),
        ("hello", False),
        (f'{{"x": "y"}}{ONE}', False),
        (f"Wait. {ONE}", False),
        (ONE.replace("1}}", '"x"}}'), False),
    ],
)
def test_grammar_beside_an_answer_is_that_answer_or_calls(text: str, accepted: bool) -> None:
    assert matches(beside("answer", thought=MARKS), text) is accepted


def test_frame_of_thought_leaves_room_before_the_answer_alone() -> None:
    grammar = Grammar(kind="regex", source="[0-9]+", frame=answer_frame(MARKS, ByteTokenizer(), None, begun=False))
    assert matches(grammar, "12")
    assert matches(grammar, "<think>perhaps 3 or x</think>\n\n12")
    assert not matches(grammar, "<think>perhaps</think>\n\nx")


@pytest.mark.parametrize("kind", ["text", "answer"])
def test_grammar_beside_something_needs_to_see_where_a_call_begins(kind: Beside) -> None:
    fenced = CallPattern('[{"name": "', '", "arguments": ', "", "}]", entries=("```json\n",), bare=("[",), soft=True)
    with pytest.raises(CapabilityUnavailable):
        fenced.source(strict_policy(), ByteTokenizer(), beside=kind)
    bare = CallPattern('{"name": "', '", "arguments": ', "", "}", bare=("{",))
    if kind == "answer":
        with pytest.raises(CapabilityUnavailable):
            bare.source(strict_policy(), ByteTokenizer(), beside=kind)


def test_grammar_of_a_strict_tool_refuses_what_it_cannot_enforce() -> None:
    tool = ToolSpec(name="a", parameters={"type": "object", "not": {"required": ["x"]}}, strict=True)
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters.*not cannot be enforced") as refusal:
        HERMES.source(ToolPolicy(tools=(tool,)), ByteTokenizer(), param="tools")
    assert (refusal.value.param, refusal.value.code) == ("tools[0].function.parameters", "unsupported_schema")


@pytest.mark.parametrize("beside", [{}, {"allOf": [{"title": "it took the place of oneOf"}]}])
def test_grammar_of_a_loose_tool_takes_parts_that_overlap(beside: dict[str, Any]) -> None:
    number = {"oneOf": [{"type": "integer"}, {"type": "number"}], **beside}
    loose = {"properties": {"oneOf": number}, "required": ["oneOf"]}
    wanted = ToolPolicy(tools=(ToolSpec(name="a", parameters=loose),), choice=ToolChoice(mode="required"))
    assert accepts('<tool_call>\n{"name": "a", "arguments": {"oneOf": 1}}\n</tool_call>', wanted)
    assert not accepts('<tool_call>\n{"name": "a", "arguments": {"oneOf": "x"}}\n</tool_call>', wanted)


def of(parameters: Any, *, strict: bool = False, name: str = "a") -> ToolPolicy:
    """Calls of one tool alone, which must come."""
    tool = ToolSpec(name=name, parameters=parameters, strict=strict)
    return ToolPolicy(tools=(tool,), choice=ToolChoice(mode="required"))


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "a", "arguments": {arguments}}}\n</tool_call>'


def held(**properties: Any) -> dict[str, Any]:
    """An object that has these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


INTEGER: dict[str, Any] = {"type": "integer"}


@pytest.mark.parametrize(
    "schema",
    [
        {**held(a={"$ref": "#/oneOf/0/properties/b"}), "oneOf": [held(a={}, b=INTEGER), held(a={})]},
        held(a={"$ref": "#/$defs/n/oneOf/1"}) | {"$defs": {"n": {"oneOf": [{"type": "string"}, INTEGER]}}},
        held(a={"oneOf": [{"$ref": "#/properties/a/oneOf/1"}, INTEGER]}),
        held(a={"$ref": "#/allOf/0/properties/c"}) | {"allOf": [{"properties": {"c": INTEGER}}]},
        held(a={"anyOf": [{"$ref": "#/properties/a/anyOf/1"}, {"oneOf": [INTEGER, {"const": 3}]}]}),
        held(a={"$ref": "#/then/properties/a"}) | {"if": {"required": ["b"]}, "then": {"properties": {"a": INTEGER}}},
        held(a={"$ref": "#/not/properties/c%20%C3%A9"}) | {"not": held(**{"c é": INTEGER})},
        held(a={"$ref": "#/else"})
        | {"if": {"required": ["a"]}, "else": {"oneOf": [INTEGER, {"$ref": "#/else/oneOf/0"}]}},
    ],
    ids=json.dumps,
)
def test_grammar_of_a_loose_tool_follows_references_into_parts_that_are_not_enforced(schema: dict[str, Any]) -> None:
    """A reference into a ``oneOf`` of its own once led nowhere, as the parts had been moved."""
    assert accepts(called('{"a": 1}'), of(schema))
    assert not accepts(called('{"a": "x"}'), of(schema))


def test_grammar_of_a_tool_allows_objects_alone_whatever_else_the_schema_does() -> None:
    several = held(a=INTEGER) | {"type": ["null", "object", "string"]}
    for schema in (several, {"enum": [5, {"a": 1}]}, {"anyOf": [{"type": "string"}, held(a=INTEGER)]}):
        assert accepts(called('{"a": 1}'), of(schema)), schema
        for other in ("null", '"x"', "5"):
            assert not accepts(called(other), of(schema)), schema


FAULTS: list[tuple[Any, str, bool, str]] = [
    (held(b={"type": "string", "pattern": "(?=x)"}), "#/properties/b/pattern", False, "look-around"),
    (held(b={"type": "string", "pattern": r"(a)\1"}), "#/properties/b/pattern", False, "backreferences"),
    (held(b={"type": "string", "minLength": 3, "maxLength": 2}), "#/properties/b", True, "minLength"),
    (held(**{'b "é': {"type": "string", "pattern": "^a$", "maxLength": 0}}), '#/properties/b "é', False, "empty"),
    (held(b={"items": False, "minItems": 1, "type": "array"}), "#/properties/b/items", False, "false"),
    (held(b={"pattern": "("}) | {"additionalProperties": False}, "#/properties/b/pattern", True, "unclosed"),
    (held(a={"anyOf": [False, True]}, b=held(c=False, d=False)), "#/properties/b/properties/c", False, "false"),
    (held(b={"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "#", False, "without end"),
    (held(b=False), "#/properties/b", True, "false"),
]


@pytest.mark.parametrize(("schema", "pointer", "strict", "why"), FAULTS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("named", [False, True])
def test_schema_of_a_tool_that_does_not_compile_is_refused_by_tool_and_pointer(
    schema: Any, pointer: str, strict: bool, why: str, named: bool
) -> None:
    """The error once named neither, and the only tool offered was counted as the first of the request."""
    faulty = ToolSpec(name="b\n", parameters=schema, strict=strict)
    choice = ToolChoice(mode="named", name="b\n") if named else ToolChoice(mode="required")
    tokens = ByteTokenizer()

    def compiled() -> object:
        source = HERMES.source(ToolPolicy(tools=(A, faulty), choice=choice), tokens)
        grammar = Grammar(kind="calls", source=source)
        return GrammarCompiler(tokens, tokens.vocab_size).compile(grammar, param="tool_choice")

    with pytest.raises(RequestError, match=re.escape(why)) as refusal:
        compiled()
    assert (refusal.value.param, refusal.value.code) == ("tools[1].function.parameters", "invalid_schema")
    assert r'tools[1].function.parameters of "b\n"' in str(refusal.value)
    assert f"at {pointer}:" in str(refusal.value)


def test_fault_of_an_answer_s_schema_beside_tools_is_not_told_of_a_tool() -> None:
    tokens = ByteTokenizer()
    frame = pattern().source(ToolPolicy(tools=(A,)), tokens, beside="answer")
    answer = Grammar(kind="json_schema", source=json.dumps(held(c={"type": "string", "pattern": "("})), frame=frame)
    with pytest.raises(RequestError, match="at #/properties/c/pattern:") as refusal:
        GrammarCompiler(tokens, tokens.vocab_size).compile(answer, param="response_format")
    assert (refusal.value.param, refusal.value.code) == ("response_format", "invalid_schema")


PUBLISHED = {
    "qwen/llamacpp__Qwen-Qwen3-0.6B.jinja": ("<tool_call>", True),
    "deepseek/llamacpp__deepseek-ai-DeepSeek-V3.1.jinja": ("<｜tool▁calls▁begin｜>", True),
    "kimi/llamacpp__moonshotai-Kimi-K2.jinja": ("<|tool_calls_section_begin|>", True),
    "llama/llamacpp__meta-llama-Llama-3.1-8B-Instruct.jinja": ("", False),
}
"""Template -> the marker of its calls, and whether they can stand instead of an answer."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_grammar_of_published_templates_binds_the_calls_they_write(name: str) -> None:
    source = shared(f"templates/{name}").read_text()
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    probed = probe_template(ChatRenderer(template), RegistryReader())
    found = call_pattern(probed.replies, probed.capabilities.tool_format)
    assert found is not None
    marker, answers = PUBLISHED[name]
    assert found.marker == marker
    names = {sample.name: ToolSpec(name=sample.name, parameters=_parameters(sample), strict=True) for sample in BOTH}
    bound = ToolPolicy(tools=tuple(names.values()))
    grammar = Grammar(kind="calls", source=found.source(bound, ByteTokenizer(), beside="text"))
    call = (found.before + FIRST.name + found.between.replace(INDEX, "0"), json.dumps(FIRST.arguments), found.after)
    assert matches(grammar, "".join(call))
    assert matches(grammar, f"Words. {''.join(call)}" if marker else "Words.")
    assert not matches(grammar, "".join((call[0], json.dumps({**FIRST.arguments, FIRST.number_key: "x"}), call[2])))
    if answers:
        found.source(bound, ByteTokenizer(), beside="answer")


BOTH = (FIRST, SECOND)


def _parameters(sample: Sample) -> dict[str, Any]:
    declared: dict[str, Any] = sample.declaration["function"]["parameters"]
    return {**declared, "additionalProperties": False}
