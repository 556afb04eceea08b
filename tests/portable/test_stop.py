"""Stop strings: against a search of the whole text, for every way to cut the text in pieces."""

from __future__ import annotations

from typing import Any, SupportsIndex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.portable.vocabularies import UNHURRIED
from troth.errors import RequestError
from troth.text.stop import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def whole(stops: list[str], text: str) -> tuple[str, str | None]:
    """What a reader of the whole text sees, and the stop string: the first to be complete, the longest of equals."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            match = max(complete, key=len)
            return text[: end - len(match)], match
    return text, None


def in_pieces(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join([*(matcher.push(piece) for piece in pieces), matcher.flush()])
    return shown, matcher.match


@UNHURRIED
@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=8))
@example(["aab"], ["a", "aa", "b"])
@example(["abcd", "bc"], ["abcd"])
@example(["abc", "bc"], ["ab", "c"])
def test_stop_result_is_that_of_the_whole_text_for_every_split(stops: list[str], pieces: list[str]) -> None:
    assert in_pieces(stops, pieces) == whole(stops, "".join(pieces))


@UNHURRIED
@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=8))
def test_stop_withholds_only_a_possible_beginning(stops: list[str], pieces: list[str]) -> None:
    matcher, given_text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        given_text += piece
        shown += matcher.push(piece)
        if matcher.match is None:
            held = given_text[len(shown) :]
            assert given_text == shown + held
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "match"),
    [
        (["END"], ["one EN", "D two"], "one ", "END"),
        (["END"], ["one EN", "T two"], "one ENT two", None),
        (["END"], ["one EN"], "one EN", None),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["abc", "bc", "c"], ["xabc"], "x", "abc"),
        (["\n\n"], ["a\n", "\nb"], "a", "\n\n"),
        (["é"], ["caf", "é"], "caf", "é"),
        ([], ["any", "thing"], "anything", None),
        (["x"], [], "", None),
    ],
)
def test_stop_examples(stops: list[str], pieces: list[str], shown: str, match: str | None) -> None:
    assert in_pieces(stops, pieces) == (shown, match)


def test_stop_shows_nothing_more_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert (matcher.push("a END b"), matcher.match) == ("a ", "END")
    assert matcher.push("more END") == matcher.flush() == ""
    assert matcher.match == "END"


def test_stop_refuses_an_empty_string() -> None:
    with pytest.raises(RequestError) as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"


class CountedText(str):
    """Text that counts the characters copied out of it."""

    num_copied = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        part = super().__getitem__(key)
        CountedText.num_copied += len(part)
        return part


class CountedLinks(list[int]):
    """Fallback links that count how often one is followed."""

    num_followed = 0

    def __getitem__(self, key: Any) -> Any:
        CountedLinks.num_followed += 1
        return super().__getitem__(key)


def test_stop_work_is_linear_in_the_text() -> None:
    """A text that keeps almost matching costs the same per character however long the stop string is."""
    CountedText.num_copied = CountedLinks.num_followed = 0
    matcher = StopMatcher(["a" * 5_000 + "b"])
    matcher._fallback = CountedLinks(matcher._fallback)
    pieces = [CountedText("a" * 5_000), *(CountedText("a") for _ in range(5_000)), CountedText("c")]
    shown = "".join([*map(matcher.push, pieces), matcher.flush()])
    assert shown == "a" * 10_000 + "c"
    assert CountedText.num_copied <= len(shown)
    assert CountedLinks.num_followed <= 2 * len(shown)
