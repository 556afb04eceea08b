"""Each wire format by one example: it is read, in prose and in pieces; what is not a call stays text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.portable.tool_corpus import comparable, read
from tests.portable.tool_examples import (
    CHANNEL_EXAMPLES,
    COMPILED,
    ENDS_EARLY,
    EXAMPLES,
    POLICY,
    channel_form,
)
from troth.contracts.tools import ToolCall, ToolCallDelta, ToolError
from troth.text.channels import CHANNELS
from troth.text.classifier import Classifier, Piece, Reply, ReplyFormat
from troth.text.tool_formats import FORMATS

NAMES = sorted(EXAMPLES)
# Formats whose calls are streamed while they are open, and can be cut after they began.
STREAMED = [name for name in NAMES if not FORMATS[name].soft and name not in ENDS_EARLY]


def reply_to(name: str, raw: str) -> Reply:
    return read(Classifier(ReplyFormat.named(tools=name), tools=COMPILED), raw)


def test_tool_formats_have_an_example_each() -> None:
    assert set(EXAMPLES) == set(FORMATS)
    assert set(CHANNEL_EXAMPLES) == set(CHANNELS)


@pytest.mark.parametrize("name", NAMES)
def test_tool_formats_read_a_call(name: str) -> None:
    reply = reply_to(name, EXAMPLES[name])
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("f", {"city": "Paris", "n": 1})]
    assert (reply.text, reply.errors) == ("", [])


@pytest.mark.parametrize("name", NAMES)
def test_tool_formats_read_calls_between_prose(name: str) -> None:
    reply = reply_to(name, f"First.\n{EXAMPLES[name]}\n\nSecond: {EXAMPLES[name]}")
    assert [call.name for call in reply.calls] == ["f", "f"]
    assert [call.index for call in reply.calls] == [0, 1]
    assert len({call.id for call in reply.calls}) == 2
    assert reply.text.split() == ["First.", "Second:"]


@pytest.mark.parametrize("name", NAMES)
def test_tool_formats_read_calls_that_follow_each_other(name: str) -> None:
    reply = reply_to(name, f"{EXAMPLES[name]}\n{EXAMPLES[name]}\n")
    assert len(reply.calls) == 2
    assert reply.text == ""


@pytest.mark.parametrize("name", NAMES)
def test_tool_formats_leave_a_cut_call_in_the_text(name: str) -> None:
    raw = EXAMPLES[name]
    for end in range(1, len(raw)):
        reply = reply_to(name, raw[:end])
        if reply.calls:
            assert json.loads(reply.calls[0].arguments) == {"city": "Paris", "n": 1}
            assert name in ENDS_EARLY or FORMATS[name].section_ends, f"accepted at {raw[:end]!r}"
        else:
            assert reply.text == raw[:end]
            assert {error.reason for error in reply.errors} <= {"unclosed"}


@pytest.mark.parametrize("name", NAMES)
def test_tool_formats_leave_a_call_of_an_unknown_tool_in_the_text(name: str) -> None:
    tools = type(COMPILED)([])
    assert read(Classifier(ReplyFormat.named(tools=name), tools=tools), EXAMPLES[name]).text == EXAMPLES[name]
    other = type(COMPILED)([replace(POLICY.tools[0], name="other")])
    reply = read(Classifier(ReplyFormat.named(tools=name), tools=other), EXAMPLES[name])
    assert reply.text == EXAMPLES[name]
    soft = EXAMPLES[name].startswith(FORMATS[name].soft or ("\0",))
    assert [error.reason for error in reply.errors] == ([] if soft else ["unknown_tool"])


@pytest.mark.parametrize("name", NAMES)
def test_tool_formats_leave_arguments_that_fail_their_schema_in_the_text(name: str) -> None:
    strict = type(COMPILED)([replace(POLICY.tools[0], parameters={"properties": {"city": {"const": "Rome"}}})])
    form = ReplyFormat.named(tools=name)
    reply = read(Classifier(form, tools=strict), EXAMPLES[name])
    assert (reply.text, reply.calls) == (EXAMPLES[name], [])
    assert [(error.reason, error.pointer) for error in reply.errors] == [("arguments_invalid", "/city")]
    forwarded = read(Classifier(form, replace(POLICY, validation="forward"), tools=strict), EXAMPLES[name])
    assert forwarded.text == ""
    assert [call.error and call.error.reason for call in forwarded.calls] == ["arguments_invalid"]


@pytest.mark.parametrize("name", NAMES)
def test_tool_formats_stop_after_one_call_when_calls_are_not_parallel(name: str) -> None:
    classifier = Classifier(ReplyFormat.named(tools=name), replace(POLICY, parallel=False), tools=COMPILED)
    reply = read(classifier, EXAMPLES[name] + EXAMPLES[name])
    assert classifier.finished
    assert len(reply.calls) == 1
    assert EXAMPLES[name][-20:] in reply.text


@pytest.mark.parametrize("name", NAMES)
def test_tool_formats_are_not_read_inside_reasoning(name: str) -> None:
    form = ReplyFormat.named(tools=name, reasoning="think")
    reply = read(Classifier(form, tools=COMPILED), f"<think>{EXAMPLES[name]}</think>Done.")
    assert (reply.reasoning, reply.text, reply.calls) == (EXAMPLES[name], "Done.", [])


@pytest.mark.parametrize("name", NAMES)
def test_tool_formats_stream_name_once_and_arguments_in_pieces(name: str) -> None:
    classifier = Classifier(ReplyFormat.named(tools=name), replace(POLICY, eager=True), tools=COMPILED)
    outputs = [output for character in EXAMPLES[name] for output in classifier.push(character)] + classifier.flush()
    deltas = [output for output in outputs if isinstance(output, ToolCallDelta)]
    call = next(output for output in outputs if isinstance(output, ToolCall))
    assert [delta.name for delta in deltas if delta.name] == ["f"]
    assert [delta.id for delta in deltas if delta.id] == [call.id]
    assert {delta.index for delta in deltas} == {0}
    assert "".join(delta.arguments for delta in deltas) == call.arguments
    if not FORMATS[name].soft:
        assert len(deltas) > 3, "arguments must arrive in pieces"
        assert outputs.index(deltas[-1]) < outputs.index(call)


@pytest.mark.parametrize("name", STREAMED)
def test_tool_formats_withdraw_a_streamed_call_that_is_cut(name: str) -> None:
    raw = EXAMPLES[name][: EXAMPLES[name].index("Paris") + 4]
    classifier = Classifier(ReplyFormat.named(tools=name), replace(POLICY, eager=True), tools=COMPILED)
    outputs = classifier.push(raw) + classifier.flush()
    streamed = next(output.id for output in outputs if isinstance(output, ToolCallDelta) and output.id)
    withdrawn = [output for output in outputs if isinstance(output, ToolError)]
    assert [(error.reason, error.call_id) for error in withdrawn] == [("unclosed", streamed)]
    assert "".join(output.text for output in outputs if isinstance(output, Piece) and output.kind == "text") == raw


@pytest.mark.parametrize("name", sorted(CHANNEL_EXAMPLES))
def test_tool_formats_of_channels_read_a_call(name: str) -> None:
    form, tail = channel_form(name)
    reply = read(Classifier(form, tools=COMPILED, prompt_tail=tail), CHANNEL_EXAMPLES[name])
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("f", {"city": "Paris", "n": 1})]
    assert (reply.text, reply.reasoning, reply.errors) == ("", "", [])


@pytest.mark.parametrize("name", sorted(CHANNEL_EXAMPLES))
def test_tool_formats_of_channels_are_text_without_tools(name: str) -> None:
    form, tail = channel_form(name)
    reply = read(Classifier(form, tools=type(COMPILED)([]), prompt_tail=tail), CHANNEL_EXAMPLES[name])
    assert reply.calls == []
    assert "Paris" in reply.text


def test_tool_formats_with_bare_objects_take_the_whole_answer_or_nothing() -> None:
    call = '{"name": "f", "parameters": {"city": "Paris"}}'
    assert [item.name for item in reply_to("llama3_json", f" {call}\n").calls] == ["f"]
    for answer in (f"{call} is how", f"Use {call}", '{"name": "Ada", "age": 36}', '{"parameters": {}}', "{"):
        reply = reply_to("llama3_json", answer)
        assert (reply.text, reply.calls, reply.errors) == (answer, [], [])


def test_tool_formats_accept_an_array_as_a_whole_or_not_at_all() -> None:
    raw = '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Rome"}}, {"name": "h", "arguments": {}}]'
    reply = reply_to("mistral", raw)
    assert (reply.text, reply.calls) == (raw, [])
    assert [(error.name, error.reason) for error in reply.errors] == [("f", "malformed"), ("h", "unknown_tool")]


def test_tool_formats_keep_ids_of_the_model_and_make_the_others() -> None:
    kimi = reply_to("kimi_k2", EXAMPLES["kimi_k2"] * 2)
    assert kimi.calls[0].id == "functions.f:0"
    assert kimi.calls[1].id.startswith("call_"), "an id that is taken is not given again"
    mistral = reply_to("mistral", EXAMPLES["mistral"])
    assert len(mistral.calls[0].id) == 9
    assert mistral.calls[0].id.isalnum()


def test_tool_formats_read_python_literals_as_the_language_does() -> None:
    call = r"""g(a='it\'s', b="\x41\u00e9\n", c='''x'y''', d=[1, -2.5e3, (True, None)], e={'k': []}, f='')"""
    arguments = json.loads(reply_to("lfm2", f"<|tool_call_start|>[{call}]<|tool_call_end|>").calls[0].arguments)
    assert arguments == {
        "a": "it's",
        "b": "Aé\n",
        "c": "x'y",
        "d": [1, -2500.0, [True, None]],
        "e": {"k": []},
        "f": "",
    }


def test_tool_formats_evaluate_nothing() -> None:
    for value in ("__import__('os')", "1+1", "f'{x}'", "[x for x in y]", "open"):
        reply = reply_to("lfm2", f"<|tool_call_start|>[g(a={value})]<|tool_call_end|>")
        assert (reply.calls, [error.reason for error in reply.errors]) == ([], ["malformed"])


def test_tool_formats_outcome_does_not_depend_on_whether_arguments_are_streamed() -> None:
    for name in NAMES:
        raw = f"{EXAMPLES[name]} and {EXAMPLES[name]}"[:-3]
        form = ReplyFormat.named(tools=name)
        eager = read(Classifier(form, replace(POLICY, eager=True), tools=COMPILED), raw)
        patient = read(Classifier(form, POLICY, tools=COMPILED), raw)
        assert comparable(eager)[0] == comparable(patient)[0]
        assert [call.arguments for call in eager.calls] == [call.arguments for call in patient.calls]


@pytest.mark.parametrize(
    ("name", "raw", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"type": "function", "id": 7, "name": "g", "arguments": {}}</tool_call>', {}),
        ("hermes", '<tool_call>{"arguments": {"a": [1, {}]}, "name": "g"}</tool_call>', {"a": [1, {}]}),
        ("function_tags", '<function=g>{"a": 1}</function>', {"a": 1}),
        ("function_tags", "<function=g></function>", {}),
        ("function_tags", "<function=g><parameter=a></parameter></function>", {"a": ""}),
        ("function_tags", "<function=g><parameter=a>\n\n</parameter></function>", {"a": ""}),
        ("function_tags", "<function=g><parameter=a>\n</parameter></function>", {"a": ""}),
        ("minicpm5", "<function name='g'><param name=a><![CDATA[</param>]]></param></function>", {"a": "</param>"}),
        ("kimi_k2", "<|tool_call_begin|>g<|tool_call_argument_begin|>{}<|tool_call_end|>", {}),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>", {}),
        ("gemma4", '<|tool_call>call:g{"a":{<|"|>b<|"|>:[],c:[1,x y]}}<tool_call|>', {"a": {"b": [], "c": [1, "x y"]}}),
        ("gemma4", "<|tool_call>call:g { } <tool_call|>", {}),
        (
            "lfm2",
            "<|tool_call_start|>g(a=[], b=(1,), c={}, d={'k': 1, 'l': 2,})<|tool_call_end|>",
            {"a": [], "b": [1], "c": {}, "d": {"k": 1, "l": 2}},
        ),
        ("lfm2", '<|tool_call_start|>[g(a="""x"y""", b="\\q\\\n")]<|tool_call_end|>', {"a": 'x"y', "b": "\\q"}),
        (
            "minimax_m3",
            "NS<tool_call>NS<invoke name=g>NS<a>NS<item>1NS</item>NS<item>xNS</item>NS</a>NS</invoke>",
            {"a": [1, "x"]},
        ),
        (
            "minimax_m3",
            "NS<tool_call>NS<invoke name=g>NS<a>NS<b>1NS</b>NS<c>NS</c>NS</a>NS</invoke>",
            {"a": {"b": 1, "c": ""}},
        ),
        ("mistral", "[TOOL_CALLS] g [CALL_ID] a1 [ARGS] {}", {}),
    ],
)
def test_tool_formats_read_less_usual_spellings(name: str, raw: str, arguments: dict[str, object]) -> None:
    reply = reply_to(name, raw.replace("NS", "]<]minimax[>["))
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("g", arguments)]
    assert reply.text == ""


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("hermes", '<tool_call>{"name": "g", "name": "f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "g", "arguments": {}, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "g", "arguments": {"a": [}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "g", "arguments": }</tool_call>'),
        ("hermes", '<tool_call>{"name": "g", "id": {"a": 1, "a": 2}, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "g", arguments: {}}</tool_call>'),
        ("function_tags", "<function=g><parameter=a>1</parameter>text</function>"),
        ("function_tags", f"<function=g><parameter={'k' * 200}>1</parameter></function>"),
        ("function_tags", f"<function=g>{''.join(f'<parameter=k{n}>1</parameter>' for n in range(257))}</function>"),
        ("minimax_m2", '<minimax:tool_call><invoke name=g><parameter name="<">1</parameter></invoke>'),
        ("argument_pairs", "<tool_call>g<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>"),
        ("gemma4", "<|tool_call>call:g{a:}<tool_call|>"),
        ("gemma4", "<|tool_call>call:g{a:1,}<tool_call|>"),
        ("gemma4", f"<|tool_call>call:g{{a:{'[' * 70}{']' * 70}}}<tool_call|>"),
        ("lfm2", f"<|tool_call_start|>[g(a={'[' * 70}{']' * 70})]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[g(a={1: 2})]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[g(a='\\xZZ')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[g(a='\\UFFFFFFFF')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[g(1)]<|tool_call_end|>"),
        ("minimax_m3", f"NS<tool_call>NS<invoke name=g>{'NS<a>' * 70}"),
        ("minimax_m3", "NS<tool_call>NS<invoke name=g>NS<a>NS<b>1NS</b>NS<b>1NS</b>NS</a>NS</invoke>"),
        ("minimax_m3", "NS<tool_call>NS<invoke name=g>NS<a>textNS<b>1NS</b>NS</a>NS</invoke>"),
        ("minimax_m3", "NS<tool_call>NS<invoke name=g>NS<a>1NS</b>NS</invoke>"),
    ],
)
def test_tool_formats_refuse_broken_calls_and_show_them(name: str, raw: str) -> None:
    raw = raw.replace("NS", "]<]minimax[>[")
    reply = reply_to(name, raw)
    assert (reply.text, reply.calls) == (raw, [])
    assert [error.reason for error in reply.errors] == ["malformed"]


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("hermes", "<tool_call>[</tool_call>"),
        ("longcat", "<longcat_tool_call> </longcat_tool_call>"),
        ("hermes", '<tool_call>{"k\\'),
        ("hermes", '<tool_call>{"name": nope}</tool_call>'),
        ("minimax_m2", "<minimax:tool_call><invoke name=>"),
        ("function_tags", "<function=><parameter=a>1</parameter></function>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="">'),
        ("argument_pairs", f"<tool_call>{'n' * 200}</tool_call>"),
        ("gemma4", "<|tool_call>call:{a:1}<tool_call|>"),
        ("functiongemma", "<start_function_call>call:"),
        ("minimax_m3", "NS<tool_call>NS<invoke name=>NS</invoke>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>[]<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|> nothing"),
        ("mistral", "[TOOL_CALLS] [ is a marker"),
        ("mistral", "[TOOL_CALLS] some words {}"),
        ("mistral", "[TOOL_CALLS]g[ARGS]text"),
        ("lfm2", "<|tool_call_start|>[](url)<|tool_call_end|>"),
    ],
)
def test_tool_formats_take_markup_without_a_name_for_text(name: str, raw: str) -> None:
    raw = raw.replace("NS", "]<]minimax[>[")
    reply = reply_to(name, raw)
    assert (reply.text, reply.calls, reply.errors) == (raw, [], [])


def test_tool_formats_hand_on_one_call_of_an_array_when_calls_are_not_parallel() -> None:
    raw = '[TOOL_CALLS][{"name": "g", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]'
    for eager in (False, True):
        classifier = Classifier(
            ReplyFormat.named(tools="mistral"), replace(POLICY, parallel=False, eager=eager), tools=COMPILED
        )
        reply = read(classifier, raw)
        assert (classifier.num_calls, reply.text) == (1, "")
        assert [call.arguments for call in reply.calls] == ["{}"]
        assert [error.reason for error in reply.errors] == ["too_many_calls"]
