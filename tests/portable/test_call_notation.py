"""Grammars of calls whose arguments are no JSON object: what they accept reads back as a valid call of the schema."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.portable.tool_corpus import read
from tests.portable.tool_examples import EXAMPLES, TOOLS
from tests.shared_data import shared
from troth.contracts.capabilities import ReasoningCapability, TemplateCapabilities
from troth.contracts.grammar import Grammar
from troth.contracts.tools import ToolChoice, ToolPolicy, ToolSpec
from troth.errors import CapabilityUnavailable, RequestError
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.call_pattern import CallPattern, call_pattern
from troth.text.channels import CHANNELS
from troth.text.chat_renderer import ChatRenderer
from troth.text.chat_template import ChatTemplate
from troth.text.chat_terms import ChatModel, ChatTerms
from troth.text.classifier import Classifier, Reply, ReplyFormat
from troth.text.grammar import GrammarCompiler
from troth.text.grammar_session import GrammarSession
from troth.text.probe_formats import RegistryReader
from troth.text.template_probe import probe_template
from troth.text.tool_calls import ToolSet
from troth.text.tool_formats import FORMATS

NOTATED = sorted(name for name, form in FORMATS.items() if form.notation)
CONTROL = (
    "｜DSML｜",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    '<|"|>',
    "<escape>",
    "</arg_value>",
    "]<]minimax[>[",
    "<tool_call>",
)
MAX_TOKENS = 3000


class MarkedTokenizer(ByteTokenizer):
    """A byte tokenizer with control tokens for marks of some formats, as their models have them."""

    vocab_size = 257 + len(CONTROL)  # type: ignore[misc]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        pieces = re.split(f"({'|'.join(map(re.escape, CONTROL))})", text) if parse_special else [text]
        return [
            one for piece in pieces for one in ([257 + CONTROL.index(piece)] if piece in CONTROL else piece.encode())
        ]

    def token_bytes(self, token_id: int) -> bytes:
        return CONTROL[token_id - 257].encode() if token_id > 256 else super().token_bytes(token_id)


PLAIN, MARKED = ByteTokenizer(), MarkedTokenizer()
COMPILERS = {id(tokens): GrammarCompiler(tokens, tokens.vocab_size) for tokens in (PLAIN, MARKED)}


def pattern(name: str) -> CallPattern:
    """The pattern of the example that the format's own test has."""
    form = FORMATS[name]
    notation = form.notation
    assert notation is not None
    text = EXAMPLES[name].replace("｜", "\ue000")  # so that the name f is found behind what can open it
    start = re.search(r"""(?<=[=>\[("'\n:])f(?=[>\s<({"'])""", text)
    assert start is not None, name
    text = text.replace("\ue000", "｜")
    after = text[text.rindex(notation.close) + len(notation.close) :]
    return CallPattern(text[: start.start()], "", "", after, form.entries, form.bare, False, notation)


def session(name: str, tools: tuple[ToolSpec, ...], tokens: ByteTokenizer = PLAIN, **policy: Any) -> GrammarSession:
    bound = ToolPolicy(tools=tools, choice=ToolChoice(mode="required"), **policy)
    source = pattern(name).source(bound, tokens)
    return COMPILERS[id(tokens)].compile(Grammar(kind="calls", source=source)).session(tokens.eos_ids)


def accepts(name: str, text: str, tools: tuple[ToolSpec, ...] = TOOLS[:1], tokens: ByteTokenizer = PLAIN) -> bool:
    found = session(name, tools, tokens)
    for token_id in tokens.encode(text):
        if found.is_complete:
            return False
        found.advance(token_id)
    return found.is_accepting


def reading(name: str, text: str, tools: tuple[ToolSpec, ...]) -> Reply:
    form = ReplyFormat.named(tools=name)
    return read(Classifier(form, ToolPolicy(tools=tools), tools=ToolSet(tools)), text)


def walk(found: GrammarSession, choose: random.Random, marks: list[str], tokens: ByteTokenizer) -> str | None:
    """An answer made of random tokens that the grammar allows; None where it does not come to an end."""
    ids: list[int] = []
    while len(ids) < MAX_TOKENS:
        allowed = allowed_ids(found)
        if found.is_complete or (found.is_accepting and choose.random() < 0.3):
            return b"".join(map(tokens.token_bytes, ids)).decode()
        if choose.random() < 0.25:
            wanted: Iterable[int] = tokens.encode(choose.choice(marks))
        else:
            shown = [one for one in allowed if 32 <= one < 127 or one > 256]
            wanted = [choose.choice(shown if shown and choose.random() < 0.9 else sorted(allowed))]
        for token_id in wanted:
            if token_id not in allowed_ids(found):
                break
            found.advance(token_id)
            ids.append(token_id)
    return None


def allowed_ids(found: GrammarSession) -> set[int]:
    mask = found.mask()
    assert found.fault is None, found.fault
    bits = int.from_bytes(mask or b"", "little")
    return {place for place in range(bits.bit_length()) if bits >> place & 1} - {256}


KEYS = ("city", "n", "Zed", "a_b", "q", "r2")
TEXTS = ("a", "ab", "1", "null", "true", "x\ny", "</", "é'\"", "")
scalars = st.one_of(
    st.just({"type": "string"}),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(lambda least: {"type": "string", "minLength": least}, st.integers(0, 3)),
    st.sampled_from(["^[a-z]+$", "a", "^x|y$", "[0-9]{2}", r"^\d+$", r"^(a|b\w)*$", r"\.", "^[^<]*$"]).map(
        lambda one: {"type": "string", "pattern": one}
    ),
    st.sampled_from(["date", "uuid", "email", "ipv4"]).map(lambda one: {"type": "string", "format": one}),
    st.lists(st.sampled_from([*TEXTS, 1, 2.5, None, {"a": "b"}, [1, "é'\""]]), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"type": "integer"}, {"type": "integer", "minimum": 3, "maximum": 12}, {"type": "number"}]),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}, {"type": ["string", "null"]}]),
    st.sampled_from([{"type": ["string", "integer"]}, {"type": ["object", "string"]}, {"const": "</b>"}]),
)


def objects(values: st.SearchStrategy[Any], max_size: int) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], flags: list[bool]) -> dict[str, Any]:
        required = [key for key, flag in zip(properties, flags, strict=False) if flag]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    keys = st.dictionaries(st.sampled_from(KEYS), values, max_size=max_size)
    return st.builds(build, keys, st.lists(st.booleans(), min_size=6, max_size=6))


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def array(items: Any, first: list[Any], least: int, more: int) -> dict[str, Any]:
        bounds = {"minItems": least, "maxItems": least + more}
        return {"type": "array", "items": items, **({"prefixItems": first} if first else {}), **bounds}

    return st.one_of(
        st.builds(array, values, st.lists(values, max_size=1), st.integers(0, 2), st.integers(0, 2)),
        objects(values, 3),
        st.lists(values, min_size=2, max_size=2).map(lambda parts: {"anyOf": parts}),
    )


parameters = objects(st.recursive(scalars, containers, max_leaves=4), 5)


@pytest.mark.parametrize("name", NOTATED)
@settings(deadline=None, max_examples=8)
@given(first=parameters, second=parameters, seed=st.integers(0, 1 << 20), marked=st.booleans())
def test_notation_accepts_only_calls_that_read_back(
    name: str, first: Any, second: Any, seed: int, marked: bool
) -> None:
    tools = (ToolSpec(name="f", parameters=first), ToolSpec(name="get_x", parameters=second))
    tokens = MARKED if marked else PLAIN
    try:
        found = session(name, tools, tokens)
    except RequestError as error:
        if "no arguments that the schema allows" not in str(error):
            raise
        return
    notation = FORMATS[name].notation
    assert notation is not None
    marks = [notation.end or ")", notation.close, *(quote.mark for quote in notation.literals.quotes), "]", "}"]
    text = walk(found, random.Random(seed), marks, tokens)
    if text is None:
        return
    reply = reading(name, text, tools)
    assert (reply.errors, reply.text.strip(), len(reply.calls)) == ([], "", 1), text


@pytest.mark.parametrize("tokens", [PLAIN, MARKED], ids=["bytes", "control tokens"])
@pytest.mark.parametrize("name", NOTATED)
def test_notation_accepts_the_call_that_its_format_is_known_by(name: str, tokens: ByteTokenizer) -> None:
    assert accepts(name, EXAMPLES[name], tokens=tokens)
    assert not accepts(name, EXAMPLES[name].replace("city", "town"), tokens=tokens), "an unknown parameter"


@pytest.mark.parametrize("name", NOTATED)
def test_notation_needs_what_is_required_and_takes_any_order(name: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "city": {"enum": ["Paris", "Rome"]}}}
    both = ToolSpec(name="f", parameters={**schema, "required": ["n", "city"]})
    assert accepts(name, EXAMPLES[name], (both,))
    assert not accepts(name, EXAMPLES[name].replace("Paris", "Oslo"), (both,)), "no value of the enum"
    more = {**schema["properties"], "x": {"type": "null"}}  # type: ignore[dict-item]
    needed = ToolSpec(name="f", parameters={"type": "object", "properties": more, "required": ["x"]})
    assert not accepts(name, EXAMPLES[name], (needed,))


@pytest.mark.parametrize("name", NOTATED)
def test_notation_of_a_tool_without_parameters_is_an_empty_call(name: str) -> None:
    tools = (ToolSpec(name="f", parameters={"type": "object", "additionalProperties": False}),)
    found = session(name, tools)
    text = walk(found, random.Random(1), [FORMATS[name].notation.close], PLAIN)  # type: ignore[union-attr]
    assert text is not None
    (call,) = reading(name, text, tools).calls
    assert json.loads(call.arguments) == {}


def test_notation_takes_many_parameters_in_their_order_alone() -> None:
    properties = {key: {"type": "integer"} for key in "abcde"}
    tools = (ToolSpec(name="f", parameters={"properties": properties, "required": ["c"]}),)

    def call(keys: str) -> str:
        return f"<|tool_call_start|>[f({', '.join(f'{key}=1' for key in keys)})]<|tool_call_end|>"

    assert [accepts("lfm2", call(keys), tools) for keys in ("abcde", "c", "bce", "cb", "abde", "cc")] == [
        *(True, True, True),
        *(False, False, False),
    ]


def test_notation_reads_references_and_recursion() -> None:
    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}}}
    tool = ToolSpec(name="f", parameters={"properties": {"t": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}})
    call = "<tool_call>f<arg_key>t</arg_key><arg_value>{}</arg_value></tool_call>"
    assert accepts("argument_pairs", call.format('{"next": {"v": 2}, "v": 1}'), (tool,))
    assert not accepts("argument_pairs", call.format('{"next": {"v": "2"}}'), (tool,))


def test_notation_keeps_texts_apart_from_values_that_look_alike() -> None:
    schema = {"type": "object", "properties": {"x": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]}}}
    call = "<seed:tool_call>\n<function=f>\n<parameter=x>{}</parameter>\n</function>\n</seed:tool_call>"
    taken = [accepts("seed", call.format(one), (ToolSpec(name="f", parameters=schema),)) for one in ("3", "7", "x3")]
    assert taken == [False, True, True]


def test_notation_of_a_strict_tool_refuses_what_it_cannot_write() -> None:
    tool = ToolSpec(name="f", parameters={"properties": {"x": {"type": "object", "minProperties": 1}}}, strict=True)
    with pytest.raises(RequestError, match="at #/properties/x/minProperties: minProperties cannot be enf") as refusal:
        session("seed", (ToolSpec(name="g"), tool))
    assert (refusal.value.param, refusal.value.code) == ("tools[1].function.parameters", "unsupported_schema")
    loose = ToolSpec(name="f", parameters=tool.parameters)
    assert session("seed", (loose,)).mask()


def test_notation_refuses_a_name_that_it_cannot_write() -> None:
    with pytest.raises(CapabilityUnavailable, match="cannot hold such a name"):
        session("gemma4", (ToolSpec(name="f{x}"),))


def test_notation_of_a_schema_that_nothing_matches_is_refused() -> None:
    tool = ToolSpec(name="f", parameters={"properties": {"x": False}, "required": ["x"]})
    with pytest.raises(RequestError, match="no arguments that it allows") as refusal:
        session("lfm2", (tool,))
    assert (refusal.value.param, refusal.value.code) == ("tools[0].function.parameters", "invalid_schema")


@pytest.mark.parametrize("name", ["function_tags", "gemma4", "lfm2"])
def test_notation_refuses_patterns_that_nobody_could_check_and_texts_that_are_none(name: str) -> None:
    """A pattern with look-around was once left out of a tool that is not strict, and validation has none either."""
    for bounds in ({"pattern": "^(?=.*x)y"}, {"pattern": "^a$", "minLength": 3}):
        schema = {"properties": {"ok": {"type": "string", "pattern": "a"}, "x": {"type": "string", **bounds}}}
        tool = ToolSpec(name="f", parameters={**schema, "required": ["x"]})
        with pytest.raises(RequestError, match="at #/properties/x") as refusal:
            session(name, (tool,))
        assert (refusal.value.param, refusal.value.code) == ("tools[0].function.parameters", "invalid_schema")
    judged = ToolSpec(name="f", parameters={"properties": {"x": {"type": "string", "pattern": r"\bfoo\b"}}})
    assert session(name, (judged,)).mask()


@pytest.mark.parametrize("name", ["function_tags", "gemma4", "lfm2", "kimi_k3"])
def test_notation_beside_text_leaves_tools_alone_that_are_not_strict(name: str) -> None:
    strict = ToolSpec(name="g", parameters={"type": "object", "additionalProperties": False}, strict=True)
    source = pattern(name).source(ToolPolicy(tools=(TOOLS[0], strict)), PLAIN, beside="text")
    found = COMPILERS[id(PLAIN)].compile(Grammar(kind="calls", source=source)).session(PLAIN.eos_ids)
    for token_id in PLAIN.encode(f"Wait. {EXAMPLES[name].replace('city', 'town')} Done."):
        found.advance(token_id)
    assert found.is_accepting


PUBLISHED = (
    "deepseek/llamacpp__deepseek-ai-DeepSeek-V3.2.jinja",
    "deepseek/llamacpp__deepseek-ai-DeepSeek-V4.jinja",
    "gemma/vllm__tool_chat_template_gemma4.jinja",
    "glm/hfjs__zai-org_GLM-5.1.jinja",
    "glm/vllm__tool_chat_template_glm4.jinja",
    "gpt-oss/llamacpp__openai-gpt-oss-120b.jinja",
    "kimi/llamacpp__Kimi-K3.jinja",
    "laguna/llamacpp__poolside-Laguna-XS-2.1.jinja",
    "lfm/llamacpp__LFM2.5-8B-A1B.jinja",
    "ling/llamacpp__inclusionai-ling-3.0-flash.jinja",
    "minicpm/hfjs__openbmb_MiniCPM3-4B.jinja",
    "minimax/llamacpp__MiniMax-M3.jinja",
    "minimax/vmlx-swift__MiniMaxM2Minimal.jinja",
    "muse-glimmer/llamacpp__muse-glimmer.jinja",
    "nemotron/llamacpp__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.jinja",
    "qwen/vllm__qwen35.jinja",
    "step/llamacpp__StepFun3.5-Flash.jinja",
)
"""Templates whose calls are no JSON object behind a marker; of each way to write them, one."""
PROPERTIES = {
    "text": {"type": "string"},
    "num": {"type": "integer"},
    "flag": {"type": "boolean"},
    "kind": {"enum": ["a b", "c"]},
    "tags": {"type": "array", "items": {"type": "string"}},
    "box": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "string"}}, "required": ["y"]},
}
VALUES = {
    "text": 'a <b> "c"\nd',
    "num": 5,
    "flag": True,
    "kind": "a b",
    "tags": ["x y", "z"],
    "box": {"x": 1.5, "y": "q"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_notation_accepts_what_published_templates_write(name: str) -> None:
    template = ChatTemplate(shared(f"templates/{name}").read_text(), bos_token="<s>", eos_token="</s>")
    probed = probe_template(ChatRenderer(template), RegistryReader())
    capabilities = probed.capabilities
    found = call_pattern(probed.replies, capabilities.tool_format, capabilities.call_form)
    assert found is not None
    schema = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
    tools = (ToolSpec(name="fn", parameters=schema, strict=True),)
    call = {"id": "call_1", "type": "function", "function": {"name": "fn", "arguments": VALUES}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "qvhi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "qvresult"},
    ]
    declared = [{"type": "function", "function": {"name": "fn", "description": "d", "parameters": schema}}]
    renderer = ChatRenderer(template).with_form(probed.form)
    reply = renderer.render(turns, tools=declared, add_generation_prompt=False).rpartition("qvhi")[2]
    before = found.channel.call_headers[0][0] if found.channel else found.before
    start = reply.rindex(f"{before}fn")
    ends = found.after or (found.notation.close if found.notation else "")
    end = reply.index(ends, start) + len(ends) if ends else reply.index("<|call|>", start)
    bound = ToolPolicy(tools=tools, choice=ToolChoice(mode="required"))
    grammar = Grammar(kind="calls", source=found.source(bound, PLAIN))
    matched = COMPILERS[id(PLAIN)].compile(grammar).session(PLAIN.eos_ids)
    for token_id in PLAIN.encode(reply[start:end]):
        matched.advance(token_id)
    assert matched.is_accepting, reply[start:end]
    for beside in ("text", "answer"):
        assert found.source(bound, PLAIN, beside=beside)  # type: ignore[arg-type]


def test_channel_binds_the_parts_of_an_answer() -> None:
    channel = CallPattern("", "", "", "", channel=CHANNELS["harmony"])
    strict = ToolSpec(
        name="f", parameters={"properties": {"n": {"type": "integer"}}, "additionalProperties": False}, strict=True
    )
    thought = ("<|channel|>analysis<|message|>", "<|end|>")
    call = ' to=functions.f<|channel|>commentary json<|message|>{"n": 1}'
    other = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}'
    thinks = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    said = "<|channel|>final<|message|>Hello."

    def accepted(text: str, mode: Any = "auto", beside: Any = "text", *, begun: bool = False) -> bool:
        policy = ToolPolicy(tools=(strict,), choice=ToolChoice(mode=mode))
        source = channel.source(policy, PLAIN, None if begun else thought, beside=beside, begun=begun)
        found = COMPILERS[id(PLAIN)].compile(Grammar(kind="calls", source=source)).session(PLAIN.eos_ids)
        for token_id in PLAIN.encode(text):
            found.advance(token_id)
        return found.is_accepting

    assert all(accepted(f"{first}{part}") for first in ("", thinks) for part in (call, other, said))
    assert not accepted(call.replace("1", "true"))
    assert not accepted(said, "required", "nothing")
    assert accepted(f"<|start|>assistant{call}", "required", "nothing", begun=True)
    assert not accepted(call, "required", "nothing", begun=True)
    reply = read(Classifier(*_harmony(), tools=ToolSet((strict,)), prompt_tail="<|start|>assistant"), thinks + other)
    assert (reply.reasoning, [one.arguments for one in reply.calls]) == ("Hm.", ['{"n": 1}'])


def _harmony() -> tuple[ReplyFormat, ToolPolicy]:
    return ReplyFormat.named(channels="harmony"), ToolPolicy(tools=(ToolSpec(name="f"),))


@pytest.mark.parametrize(
    ("tail", "begins_after", "text"),
    [
        ("<|start|>assistant", "", '<|channel|>final<|message|>{"a": 1}'),
        (
            "<|start|>assistant",
            "",
            "<|channel|>analysis<|message|>?<|end|><|start|>assistant<|channel|>final<|message|>{}",
        ),
        (
            "<|start|>assistant<|channel|>analysis<|message|>",
            "<|end|>",
            "?<|end|><|start|>assistant<|channel|>final<|message|>{}",
        ),
    ],
)
def test_channel_has_a_header_before_an_answer_s_format(tail: str, begins_after: str, text: str) -> None:
    marks = ReasoningCapability(
        markers="harmony", open="<|channel|>analysis<|message|>", close="<|end|>", kept="tool_loop"
    )
    able = TemplateCapabilities(chat=True, tool_declarations=True, tool_format="harmony", reasoning=marks)
    model = ChatModel(able, PLAIN, CallPattern("", "", "", "", channel=CHANNELS["harmony"]))
    wanted = Grammar(kind="json_object")
    for terms in (ChatTerms(), ChatTerms(policy=ToolPolicy(tools=TOOLS), declarations=({"name": "f"},))):
        grammar = terms.bound(wanted, model, f"hi{tail}", param="response_format")
        assert grammar is not None
        assert grammar.begins_after == begins_after
        found = COMPILERS[id(PLAIN)].compile(grammar).session(PLAIN.eos_ids, grammar.begins_after)
        for token_id in PLAIN.encode(text):
            found.advance(token_id)
        assert found.is_accepting, found.fault
