"""Every row of the shared corpus, whole and cut at random bytes, against the page that lists the rows that differ."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

import pytest

from tests.markdown import ROOT
from tests.portable import tool_corpus as corpus
from tests.portable.tool_examples import CHANNEL_EXAMPLES, EXAMPLES
from troth.text.channels import CHANNELS
from troth.text.tool_formats import FORMATS

FILES = ("core.jsonl", "extra.jsonl")


@pytest.mark.parametrize("name", FILES)
def test_tool_formats_read_each_row_as_its_peer_expects_or_the_page_says_why_not(name: str) -> None:
    wrong = {}
    for row in corpus.rows(name):
        found = corpus.differences(row, corpus.classified(row, corpus.formats()[row["format"]]))
        if bool(found) != (row["id"] in corpus.exceptions()):
            wrong[row["id"]] = found or "is listed in docs/tools.md, but comes out as expected"
    assert not wrong


@pytest.mark.parametrize("name", FILES)
def test_tool_formats_read_each_row_alike_however_it_is_cut(name: str) -> None:
    for row in corpus.rows(name):
        form = corpus.formats()[row["format"]]
        whole = corpus.comparable(corpus.classified(row, form))
        for number in range(corpus.NUM_SPLITS):
            cut = corpus.classified(
                row, form, partial(corpus.split, random=Random(f"{row['id']} {number}"), number=number)
            )
            assert corpus.comparable(cut) == whole, row["id"]


def test_tool_formats_page_counts_what_passes_by_family() -> None:
    passed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for place, name in enumerate(FILES):
        for row in corpus.rows(name):
            key = f"{row['family']} {place}"
            total[key] += 1
            passed[key] += row["id"] not in corpus.exceptions()
    shown = {
        f"{family} {place}": cell
        for family, _, _, _, *counts in corpus.table("Families")
        for place, cell in enumerate(counts)
        if cell != "-"
    }
    assert shown == {key: f"{passed[key]} of {total[key]}" for key in total}


def test_tool_formats_are_counted_in_the_readme_as_on_the_page() -> None:
    passed, total = 0, 0
    for _, _, _, _, core, _ in corpus.table("Families"):
        if core != "-":
            of_family = [int(number) for number in core.split(" of ")]
            passed, total = passed + of_family[0], total + of_family[1]
    readme = (ROOT / "README.md").read_text()
    assert f"{len(FORMATS) + len(CHANNELS)} tool-call formats" in readme
    assert f"({passed} of {total} published cases" in readme


def test_tool_formats_page_lists_no_row_that_is_not_in_the_corpus() -> None:
    known = {row["id"] for name in (*FILES, "reasoning_split.jsonl") for row in corpus.rows(name)}
    assert set(corpus.exceptions()) <= known
    assert all(len(reason) > 10 for reason in corpus.exceptions().values())


def test_tool_formats_page_shows_a_call_in_every_format() -> None:
    section = corpus.page().split("## Formats\n", 1)[1].split("\n## ", 1)[0]
    for name, example in {**EXAMPLES, **CHANNEL_EXAMPLES}.items():
        shown = example.replace("\n", "↵").replace("|", "\\|")
        assert any(f"`{name}`" in line and shown in line for line in section.splitlines()), name
