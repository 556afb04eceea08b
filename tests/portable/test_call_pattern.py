"""Forced calls: the pattern that a template's own writing gives away, and the grammar that is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from troth.contracts.tools import ToolChoice, ToolPolicy, ToolSpec
from troth.errors import RequestError
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.call_pattern import CallPattern, call_pattern
from troth.text.grammar import GrammarCompiler
from troth.text.probe_trial import CALL_IDS, FIRST, SECOND, Sample

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
    tokens = ByteTokenizer()
    grammar = pattern().grammar(policy, tokens, thought)
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
    assert pattern() == CallPattern(*words)


def test_pattern_leaves_out_what_a_template_writes_before_the_call() -> None:
    assert call_pattern(replies(hermes, "<think>\n\n</think>\n\n"), "hermes") == pattern()


def test_pattern_of_an_array_joins_calls_inside_it() -> None:
    found = call_pattern(replies(array), "mistral")
    assert found is not None
    assert (found.before, found.joint, found.after) == ('[TOOL_CALLS][{"name": "', '}, {"name": "', "}]")


@pytest.mark.parametrize(
    "write",
    [
        lambda *samples: "".join(f"<tool_call>{one.name} {CALL_IDS[0]} {json.dumps(one.arguments)}" for one in samples),
        lambda *samples: "".join(f"<tool_call>{one.name}(x)</tool_call>" for one in samples),
        lambda *samples: "".join(f"<tool_call>{json.dumps(one.arguments)} {one.name}" for one in samples),
    ],
    ids=["with an id", "no object", "arguments first"],
)
def test_pattern_of_another_way_to_write_calls_is_none(write: Any) -> None:
    assert call_pattern(replies(write), "hermes") is None


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

    source = HERMES.grammar(policy(), Marked()).source
    assert '<[256]> "\\n{\\"name\\": \\""' in source


def test_grammar_leaves_out_keywords_that_only_validation_can_check() -> None:
    tool = ToolSpec(name="a", parameters={"type": "object", "not": {"required": ["x"]}})
    assert "not" not in HERMES.grammar(ToolPolicy(tools=(tool,)), ByteTokenizer()).source


def test_grammar_of_a_schema_that_leads_nowhere_is_refused() -> None:
    tool = ToolSpec(name="a", parameters={"type": "object", "properties": {"n": {"$ref": "#/$defs/none"}}})
    with pytest.raises(RequestError, match=r"tools\[0\].parameters"):
        HERMES.grammar(ToolPolicy(tools=(tool,)), ByteTokenizer())
