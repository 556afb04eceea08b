"""Where reasoning begins and ends, what of it is counted, and what a forced close does."""

from __future__ import annotations

import pytest

from tests.portable.tool_corpus import read
from troth.text.classifier import Classifier, Output, Piece, Reply, ReplyFormat
from troth.text.reasoning import REASONING_FORMATS, ReasoningFormat

THINK = ReplyFormat.named(reasoning="think")
NAMES = sorted(REASONING_FORMATS)


def form_of(name: str) -> tuple[ReplyFormat, ReasoningFormat]:
    return ReplyFormat.named(reasoning=name), REASONING_FORMATS[name]


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_is_split_from_the_answer_in_every_form(name: str) -> None:
    form, thought = form_of(name)
    for opening in thought.opens:
        for closing in thought.closes:
            reply = read(Classifier(form), f"{opening}a <b\n{closing}\n\nc")
            assert (reply.reasoning, reply.text) == ("a <b", "c")


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_begins_inside_when_the_prompt_ends_with_the_marker(name: str) -> None:
    form, thought = form_of(name)
    for opening in thought.opens:
        for tail in (opening, f"assistant\n{opening.rstrip()}\n"):
            reply = read(Classifier(form, prompt_tail=tail), f"a{thought.close}b")
            assert (reply.reasoning, reply.text) == ("a", "b")


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_does_not_begin_when_the_prompt_closed_it(name: str) -> None:
    form, thought = form_of(name)
    reply = read(Classifier(form, prompt_tail=f"{thought.opens[0]}\n\n{thought.close}\n\n"), "a")
    assert (reply.reasoning, reply.text) == ("", "a")


def test_reasoning_marker_counts_only_at_the_start_of_an_answer() -> None:
    for raw in ("a<think>b</think>c", "`<think>` is a tag", "<think", " " * 65 + "<think>a</think>b"):
        reply = read(Classifier(THINK), raw)
        assert (reply.reasoning, reply.text) == ("", raw)
    reply = read(Classifier(THINK), " \n" * 32 + "<think>a</think>b<think>c</think>")
    assert (reply.reasoning, reply.text) == ("a", "b<think>c</think>")


def test_reasoning_that_is_not_closed_is_all_reasoning() -> None:
    classifier = Classifier(THINK)
    reply = read(classifier, "<think>a\n<tool_call></thi")
    assert (reply.reasoning, reply.text) == ("a\n<tool_call></thi", "")
    assert classifier.unclosed_reasoning


def test_reasoning_that_is_closed_is_not_unclosed() -> None:
    classifier = Classifier(THINK)
    read(classifier, "<think></think>")
    assert not classifier.unclosed_reasoning
    assert not classifier.in_reasoning


def test_reasoning_goes_on_where_a_prompt_left_it() -> None:
    reply = read(Classifier(THINK, continues="reasoning"), " b</think>c")
    assert (reply.reasoning, reply.text) == (" b", "c")
    reply = read(Classifier(THINK, continues="text"), "<think>b</think>")
    assert (reply.reasoning, reply.text) == ("", "<think>b</think>")


def test_reasoning_keeps_an_indent_behind_its_close() -> None:
    assert read(Classifier(THINK), "<think>a</think>\n\n    code\n").text == "    code\n"


@pytest.mark.parametrize("tail", ["", "<think>\n"])
def test_reasoning_tokens_are_counted_without_markers(tail: str) -> None:
    classifier = Classifier(THINK, prompt_tail=tail)
    opening = () if tail else ("<th", "ink>", "\n")
    counts = []
    for token in (*opening, "one", " two", "", "é", "\n", "</th", "ink>", "\n\n", "answer"):
        classifier.push(token)
        counts.append(classifier.num_reasoning_tokens)
    classifier.flush()
    assert counts == [0] * len(opening) + [1, 2, 2, 4, 4, 4, 4, 4, 4]


def test_reasoning_budget_asks_for_the_close_at_its_last_token() -> None:
    for budget in (1, 2, 3, 4):
        classifier = Classifier(THINK, prompt_tail="<think>", reasoning_budget=budget)
        asked = []
        for token in ("a", " b", "\n", "c", " d"):
            classifier.push(token)
            asked.append(classifier.must_close)
        assert asked == [None] * (budget - 1) + ["</think>"] * (6 - budget)


def test_reasoning_budget_of_zero_asks_before_the_first_token_and_not_outside_of_a_span() -> None:
    assert Classifier(THINK, prompt_tail="<think>\n", reasoning_budget=0).must_close == "</think>"
    outside = Classifier(THINK, reasoning_budget=0)
    asked = [outside.must_close]
    outside.push("<think>")
    assert [*asked, outside.must_close] == [None, "</think>"]


def test_reasoning_budget_counts_tokens_of_a_split_character_and_no_blank_lines_at_the_start() -> None:
    classifier = Classifier(THINK, prompt_tail="<think>", reasoning_budget=2)
    asked = []
    for token in ("\n", "\n", "", "é"):
        classifier.push(token)
        asked.append(classifier.must_close)
    assert asked == [None, None, None, "</think>"]


def test_reasoning_budget_waits_for_a_close_that_has_begun() -> None:
    classifier = Classifier(THINK, prompt_tail="<think>", reasoning_budget=2)
    for token in ("a", "</"):
        classifier.push(token)
    assert classifier.must_close is None


def forced(*after: str, budget: int = 1) -> tuple[Reply, str]:
    classifier = Classifier(THINK, prompt_tail="<think>", reasoning_budget=budget)
    outputs: list[Output] = classifier.push("a")
    asked = [classifier.must_close]
    classifier.force_close()
    assert [*asked, classifier.must_close] == ["</think>", None]
    for token in ("</", "think", ">", *after):
        outputs += classifier.push(token)
    outputs += classifier.flush()
    reply = Reply()
    reply.add(outputs)
    return reply, "".join(output.text for output in outputs if isinstance(output, Piece))


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (("</think>", "b"), "b"),
        (("\n\n", "</think>", "\n\nb"), "b"),
        (("</think>", "</think>b"), "</think>b"),
        (("b", "</think>"), "b</think>"),
        ((" " * 9, "</think>b"), " " * 9 + "</think>b"),
        (("</thi", "s is text"), "</this is text"),
        (("</thi",), "</thi"),
        ((), ""),
    ],
)
def test_reasoning_forced_to_close_drops_one_close_of_the_model(after: tuple[str, ...], text: str) -> None:
    reply, joined = forced(*after)
    assert (reply.reasoning, reply.text) == ("a", text)
    assert joined == "a</think>" + "".join(after)


def test_reasoning_of_gemma_that_is_empty_is_no_reasoning() -> None:
    for raw in ("<|channel>thought<channel|>a", "<|channel>thought\n<channel|>a"):
        reply = read(Classifier(ReplyFormat.named(reasoning="gemma4")), raw)
        assert (reply.reasoning, reply.text) == ("", "a")


def test_reasoning_of_harmony_is_the_analysis_channel() -> None:
    form = ReplyFormat.named(reasoning="harmony")
    raw = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
    for tail, text in (("<|start|>assistant", raw), ("<|channel|>analysis<|message|>", raw.split("<|message|>", 1)[1])):
        reply = read(Classifier(form, prompt_tail=tail), text)
        assert (reply.reasoning, reply.text) == ("a", "b")
    budgeted = Classifier(form, prompt_tail="<|channel|>analysis<|message|>", reasoning_budget=1)
    budgeted.push("a")
    assert budgeted.must_close == "<|end|>"


def test_reasoning_of_harmony_with_a_broken_header_is_text() -> None:
    raw = "<|channel|>" + "x" * 300
    reply = read(Classifier(ReplyFormat.named(reasoning="harmony")), raw)
    assert (reply.reasoning, reply.text) == ("", raw)
