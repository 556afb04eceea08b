"""The shared reasoning cases, whole and cut at random bytes, against the page that lists those that differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from tests.portable import tool_corpus as corpus
from troth.text.classifier import Classifier, Reply, ReplyFormat
from troth.text.reasoning import ReasoningFormat

# Two made-up pairs of markers that a peer's test uses for its base class.
BASE = ReasoningFormat(name="base", opens=("<test:think>", "<alt:start>"), closes=("</test:think>", "<alt:end>"))


def parts_of(row: corpus.Row) -> tuple[ReplyFormat, str]:
    """The form, and the end of the prompt."""
    if row["family"] == "BaseThinkingReasoningParser":
        form, prompt_opens = ReplyFormat(reasoning=BASE), False
    else:
        form, prompt_opens = corpus.reasoning_formats()[row["family"]]
    if form.reasoning is None or "disabled" in row["source"]["test"]:
        return form, ""
    has_open = any(mark in row["raw"] for mark in form.reasoning.opens)
    return form, form.reasoning.opens[0] if prompt_opens and not has_open else corpus.prompt_tail(row, form)


def split_of(row: corpus.Row, cut: Callable[[str], list[str]] = lambda text: [text]) -> Reply:
    form, tail = parts_of(row)
    return corpus.read(Classifier(form, prompt_tail=tail), row["raw"], cut)


def test_reasoning_of_each_row_is_split_as_its_peer_expects_or_the_page_says_why_not() -> None:
    wrong = {}
    for row in corpus.rows("reasoning_split.jsonl"):
        found = corpus.differences(row, split_of(row))
        if bool(found) != (row["id"] in corpus.exceptions()):
            wrong[row["id"]] = found or "is listed in docs/tools.md, but comes out as expected"
    assert not wrong


def test_reasoning_of_each_row_is_split_alike_however_it_is_cut() -> None:
    for row in corpus.rows("reasoning_split.jsonl"):
        whole = corpus.comparable(split_of(row))
        for number in range(corpus.NUM_SPLITS):
            cut = split_of(row, partial(corpus.split, random=Random(f"{row['id']} {number}"), number=number))
            assert corpus.comparable(cut) == whole, row["id"]
