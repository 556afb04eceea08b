"""The laws of the classifier, for any text made of a format's own parts, however it is cut."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.portable.tool_corpus import comparable, read
from tests.portable.tool_examples import CALL, CHANNEL_EXAMPLES, COMPILED, EXAMPLES, OBJECT, channel_form
from troth.contracts.tools import ToolChoice, ToolPolicy, ToolSpec
from troth.errors import RequestError
from troth.text.classifier import Classifier, Output, Piece, Reply, ReplyFormat
from troth.text.reasoning import REASONING_FORMATS
from troth.text.tool_formats import FORMATS

# The nightly profile (make fuzz) asks for more examples, and other ones each time. 100 of each law take 30 to 45 s.
NUM_EXAMPLES = int(os.environ.get("TROTH_FUZZ_EXAMPLES", "0"))
FUZZ = settings(
    max_examples=NUM_EXAMPLES or 100,
    deadline=None,
    database=None,
    derandomize=not NUM_EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow],
)
COMMON = (
    "f",
    "g",
    " ",
    "\n",
    '"',
    "'",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    "=",
    "<",
    "|",
    "é",
    "🌟",
    "\\",
    OBJECT,
    CALL,
)
SPECIAL = "<|other|>"


def parts_of(name: str, reasoning: str) -> list[str]:
    form, thought = FORMATS[name], REASONING_FORMATS[reasoning]
    own = {*form.markers, *form.inner, *form.frames, *thought.opens, *thought.closes, EXAMPLES[name]}
    tags = {piece for example in (EXAMPLES[name],) for piece in example.replace(">", ">\0").split("\0")}
    return sorted(own | tags - {""})


def lists_of(own: list[str]) -> st.SearchStrategy[list[str]]:
    """Texts of a format's own parts and of common ones, of its own alone, and of few of them: what goes wrong wants the
    same two or three markers again and again.

    Lengths are drawn first: left to itself, hypothesis makes lists of five.
    """
    few = st.lists(st.sampled_from(own), min_size=2, max_size=8, unique=True)
    return st.builds(
        lambda parts, places: [parts[place % len(parts)] for place in places],
        st.just([*own, *COMMON]) | st.just(own) | few,
        st.integers(0, 24).flatmap(lambda size: st.lists(st.integers(0, 10_000), min_size=size, max_size=size)),
    )


def fold(classifier: Classifier, pieces: list[tuple[str, bool]]) -> tuple[Reply, str]:
    outputs: list[Output] = []
    for text, special in pieces:
        outputs += classifier.push(text, special=special)
    outputs += classifier.flush()
    reply = Reply()
    reply.add(outputs)
    return reply, "".join(output.text for output in outputs if isinstance(output, Piece))


def recut(pieces: list[tuple[str, bool]], cuts: list[int]) -> list[tuple[str, bool]]:
    """The same text in other pieces; control tokens stay whole."""
    runs: list[tuple[str, bool]] = []
    for text, special in pieces:
        if runs and not special and not runs[-1][1]:
            runs[-1] = (runs[-1][0] + text, False)
        else:
            runs.append((text, special))
    cut: list[tuple[str, bool]] = []
    for text, special in runs:
        edges = [0, len(text)] if special else sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
        cut += [(text[start:end], special) for start, end in pairwise(edges)]
    return cut


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_classifier_loses_nothing_and_does_not_depend_on_the_cut(name: str) -> None:
    reasoning = {"gemma4": "gemma4", "mistral": "mistral", "kimi_k3": "kimi3", "hunyuan": "hunyuan"}.get(name, "think")
    form = ReplyFormat.named(tools=name, reasoning=reasoning)
    parts = lists_of([*parts_of(name, reasoning), SPECIAL])

    @FUZZ
    @given(
        pieces=parts.map(lambda texts: [(text, text == SPECIAL) for text in texts]),
        cuts=st.lists(st.integers(0, 400), max_size=12),
        eager=st.booleans(),
        parallel=st.booleans(),
        inside=st.booleans(),
    )
    def law(pieces: list[tuple[str, bool]], cuts: list[int], eager: bool, parallel: bool, inside: bool) -> None:
        def fresh() -> Classifier:
            policy = ToolPolicy(eager=eager, parallel=parallel)
            tail = REASONING_FORMATS[reasoning].opens[0] if inside else ""
            return Classifier(form, policy, tools=COMPILED, prompt_tail=tail)

        text = "".join(piece for piece, _ in pieces)
        whole, joined = fold(fresh(), recut(pieces, []))
        assert joined == text
        for other in (pieces, recut(pieces, cuts), recut(pieces, list(range(400)))):
            cut, joined = fold(fresh(), other)
            assert joined == text
            assert comparable(cut) == comparable(whole)

    law()


def test_reasoning_that_the_next_header_ends_has_its_start_once() -> None:
    """The end of the part before is missing."""
    form, _ = channel_form("harmony")
    texts = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "why",
        " ",
        "<|start|>",
        "assistant",
        "<|channel|>final<|message|>",
        "so",
    ]
    pieces = [(text, False) for text in texts]
    for cut in (pieces, recut(pieces, []), recut(pieces, list(range(400)))):
        reply, joined = fold(Classifier(form, tools=COMPILED, prompt_tail=""), cut)
        assert (reply.reasoning, reply.text, joined) == ("why", "so", "".join(texts))


@pytest.mark.parametrize("name", sorted(CHANNEL_EXAMPLES))
def test_classifier_of_channels_loses_nothing_and_does_not_depend_on_the_cut(name: str) -> None:
    form, tail = channel_form(name)
    assert form.channels is not None
    own = {*form.channels.starts, form.channels.header_end, *form.channels.ends, *form.channels.first_words}
    parts = sorted(own | {CHANNEL_EXAMPLES[name], "analysis", "to=functions.f", "all", "self"})

    @FUZZ
    @given(lists_of(parts), st.lists(st.integers(0, 400), max_size=12), st.booleans())
    def law(texts: list[str], cuts: list[int], with_tail: bool) -> None:
        pieces = [(text, False) for text in texts]
        results = []
        for cut in (recut(pieces, []), pieces, recut(pieces, cuts), recut(pieces, list(range(400)))):
            reply, joined = fold(Classifier(form, tools=COMPILED, prompt_tail=tail if with_tail else ""), cut)
            assert joined == "".join(texts)
            results.append(comparable(reply))
        assert all(result == results[0] for result in results)

    law()


@FUZZ
@given(st.text(max_size=60), st.sampled_from(sorted(FORMATS)))
def test_classifier_shows_plain_text_as_it_is(text: str, name: str) -> None:
    markers = (*FORMATS[name].markers, *FORMATS[name].frames, "<think>")
    if any(mark in text for mark in markers):
        return
    reply = read(Classifier(ReplyFormat.named(tools=name, reasoning="think"), tools=COMPILED), text)
    assert (reply.text, reply.reasoning) == (text, "")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_classifier_withholds_no_more_than_the_beginning_of_a_marker(name: str) -> None:
    classifier = Classifier(ReplyFormat.named(tools=name, reasoning="think"), tools=COMPILED)
    longest = max(len(mark) + 2 for mark in (*FORMATS[name].markers, "</think>"))
    shown = 0
    text = "x A sentence with < and | and [ and <| and ``` marks, none of them a call. " * 3
    for number, character in enumerate(text, 1):
        shown += sum(len(output.text) for output in classifier.push(character) if isinstance(output, Piece))
        assert number - shown < longest


def test_classifier_hides_control_tokens_that_mean_nothing_and_shows_the_same_text_spelled_out() -> None:
    form = ReplyFormat.named(tools="hermes", reasoning="think")
    classifier = Classifier(form, tools=COMPILED)
    outputs = classifier.push("a") + classifier.push("<|im_sep|>", special=True) + classifier.push("b<|im_sep|>")
    outputs += classifier.flush()
    assert [(output.kind, output.text) for output in outputs if isinstance(output, Piece)] == [
        ("text", "a"),
        ("marker", "<|im_sep|>"),
        ("text", "b<|im_sep|>"),
    ]


def test_classifier_keeps_control_tokens_inside_arguments() -> None:
    classifier = Classifier(ReplyFormat.named(tools="hermes"), tools=COMPILED)
    reply = Reply()
    for text, special in (('<tool_call>{"name": "g", "arguments": {"a": "', False), ('<"sep">', True), ('"}}', False)):
        reply.add(classifier.push(text, special=special))
    reply.add(classifier.push("</tool_call>"))
    assert reply.calls[0].arguments == '{"a": "<\\"sep\\">"}'


def test_classifier_shows_control_tokens_of_a_call_that_is_not_accepted() -> None:
    classifier = Classifier(ReplyFormat.named(tools="hermes"), tools=COMPILED)
    reply = Reply()
    for text in ('<tool_call>{"name": "h"', "<|sep|>", "</tool_call>"):
        reply.add(classifier.push(text, special=text == "<|sep|>"))
    reply.add(classifier.flush())
    assert reply.text == '<tool_call>{"name": "h"<|sep|></tool_call>'


def test_classifier_without_formats_says_everything_is_text() -> None:
    raw = "<think>a</think>" + EXAMPLES["hermes"]
    assert read(Classifier(ReplyFormat(), tools=COMPILED), raw).text == raw


def test_classifier_reads_no_call_when_the_choice_is_none() -> None:
    policy = ToolPolicy(tools=(ToolSpec(name="f"),), choice=ToolChoice(mode="none"))
    assert read(Classifier(ReplyFormat.named(tools="hermes"), policy), EXAMPLES["hermes"]).text == EXAMPLES["hermes"]


def test_classifier_reads_only_the_tool_that_was_chosen() -> None:
    tools = (ToolSpec(name="f"), ToolSpec(name="g"))
    policy = ToolPolicy(tools=tools, choice=ToolChoice(mode="named", name="g"))
    reply = read(Classifier(ReplyFormat.named(tools="hermes"), policy), EXAMPLES["hermes"])
    assert [error.reason for error in reply.errors] == ["unknown_tool"]
    with pytest.raises(RequestError, match="which is not among the tools"):
        Classifier(ReplyFormat(), ToolPolicy(tools=tools, choice=ToolChoice(mode="named", name="h")))


def test_classifier_takes_new_lines_before_a_call_for_part_of_its_marker() -> None:
    form = ReplyFormat.named(tools="hermes")
    assert read(Classifier(form, tools=COMPILED), f"Well:\n{EXAMPLES['hermes']}").text == "Well:"
    assert read(Classifier(form, tools=COMPILED), "Well:\n<tool_call>no").text == "Well:\n<tool_call>no"
