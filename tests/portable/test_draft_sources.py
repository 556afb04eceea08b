"""Who proposes what, alone: look-up in what was said, a predicted text, forced tokens; and how many drafts pay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troth.contracts.plan import DRAFTED
from troth.contracts.speculation import DRAFT_SOURCES, DraftSource, DraftSourceName, Speculation
from troth.draft.drafter import Drafter
from troth.draft.external import SYNC_TOKENS, ExternalSource
from troth.draft.forced import GrammarSource
from troth.draft.made import MadeSource, MadeTerms
from troth.draft.ngram import GRAM_TOKENS, NgramSource
from troth.draft.step_costs import FIRST_GUESS, GUESS_PER_DRAFT, StepCosts
from troth.draft.worth import FIRST_CHANCES, Chance, Worth

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def last_match(known: Sequence[int]) -> int | None:
    """The place after the latest earlier occurrence of the last tokens."""
    gram = list(known[-GRAM_TOKENS:])
    ends = [end for end in range(GRAM_TOKENS, len(known)) if list(known[end - GRAM_TOKENS : end]) == gram]
    return ends[-1] if ends and len(gram) == GRAM_TOKENS else None


@given(tokens)
def test_ngram_proposes_what_followed_the_last_tokens_before(known: list[int]) -> None:
    drafts = list(NgramSource().propose(known, 1, 4))
    place = last_match(known)
    if place is None:
        assert drafts == []
        return
    going_on = known[place:]
    while len(going_on) < 4:
        going_on += known[place:]
    assert drafts == going_on[:4]


@given(tokens, st.lists(st.integers(1, 5), max_size=20))
def test_ngram_proposes_from_a_real_place_however_tokens_arrive(known: list[int], pieces: list[int]) -> None:
    source, num_known = NgramSource(), 1
    for piece in [*pieces, len(known)]:
        num_known = min(len(known), num_known + piece)
        drafts = list(source.propose(known[:num_known], 1, 2))
        assert bool(drafts) or last_match(known[:num_known]) is None
        if drafts:
            gram = known[num_known - GRAM_TOKENS : num_known]
            follows = [known[end] for end in range(GRAM_TOKENS, num_known) if known[end - GRAM_TOKENS : end] == gram]
            assert drafts[0] in follows


def test_ngram_follows_the_place_it_found_while_the_answer_agrees() -> None:
    known = [*range(20), 50, 51, *range(5)]
    source = NgramSource()
    assert list(source.propose(known, 22, 3)) == [5, 6, 7]
    known += [5, 6, 7]
    assert list(source.propose(known, 22, 3)) == [8, 9, 10]
    known += [99]
    assert list(source.propose(known, 22, 3)) == []


def test_ngram_goes_round_a_loop_that_is_shorter_than_the_drafts() -> None:
    assert list(NgramSource().propose([7, 8, 7, 8, 7, 8, 7], 1, 5)) == [8, 7, 8, 7, 8]


def test_ngram_takes_a_long_prompt_in_once_and_a_token_in_constant_time() -> None:
    random = Random(0)
    known = [random.randrange(1000) for _ in range(100_000)]
    source = NgramSource()
    began = time.perf_counter()
    source.propose(known, len(known), 8)
    taken_in_s = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(1000):
        known.append(random.randrange(1000))
        source.propose(known, 100_000, 8)
    assert time.perf_counter() - began < max(taken_in_s, 0.01), "a thousand tokens cost more than a hundred thousand"


def test_external_follows_a_text_and_finds_it_again_behind_what_differs() -> None:
    source = ExternalSource([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert list(source.propose([0], 1, 3)) == [1, 2, 3]
    assert list(source.propose([0, 1, 2], 1, 3)) == [3, 4, 5]
    assert list(source.propose([0, 1, 2, 30], 1, 3)) == []
    assert list(source.propose([0, 1, 2, 30, 5], 1, 3)) == []
    assert list(source.propose([0, 1, 2, 30, 5, 6], 1, 3)) == [7, 8, 9]
    assert list(source.propose([0, 1, 2, 30, 5, 6, 7, 8, 9], 1, 3)) == []
    assert list(source.propose([0, 1, 2, 30, 5, 6, 7, 8, 9, 1, 2], 1, 3)) == [], "it has passed there"


def test_external_looks_for_its_place_in_the_answer_alone() -> None:
    source = ExternalSource([1, 2, 3, 4])
    assert list(source.propose([3, 4, 2], 2, 2)) == [], "the last token of the prompt is no part of it"
    assert SYNC_TOKENS == 2


@given(tokens, tokens)
def test_external_proposes_parts_of_its_text(predicted: list[int], said: list[int]) -> None:
    source = ExternalSource(predicted)
    for end in range(len(said) + 1):
        drafts = list(source.propose([9, *said[:end]], 1, 3))
        assert len(drafts) <= 3
        text = "".join(map(str, predicted))
        assert "".join(map(str, drafts)) in text


def test_grammar_proposes_what_is_forced() -> None:
    source = GrammarSource(lambda: [4, 5, 6])
    assert list(source.propose([1], 1, 2)) == [4, 5]


class Always:
    """Proposes the same for ever."""

    name = "ngram"

    def propose(self, token_ids: Sequence[int], num_prompt: int, num_tokens: int) -> Sequence[int]:
        return [7] * num_tokens


def play(
    worth: Worth, drafter: Drafter, right: float, draft_cost: float, steps: int, seed: int = 0
) -> tuple[float, int]:
    """Seconds that ``steps`` tokens took a lone row whose plain step takes one second, and the rounds there were."""
    random, seconds, done, rounds = Random(seed), 0.0, 0, 0
    while done < steps:
        drafts = drafter.propose([1] * (done + 2), 1, 1, 1)
        accepted = 0
        while accepted < len(drafts) and random.random() < right:
            accepted += 1
        cost = 1.0 + draft_cost * len(drafts) + (0.1 if drafts else 0.0)
        seconds += cost
        if drafts:
            drafter.note(len(drafts), accepted)
            rounds += 1
        worth.note_step(1, len(drafts), accepted, cost)
        done += accepted + 1
    return seconds / done, rounds


def drafter_of(worth: Worth, **values: object) -> Drafter:
    sources: list[DraftSource] = [Always()]  # type: ignore[list-item]
    return Drafter(Speculation(sources=("ngram",), **values), sources, {"ngram": worth})  # type: ignore[arg-type]


@pytest.mark.parametrize("right", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("draft_cost", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("length", [30, 300])
def test_drafts_that_do_not_pay_cost_two_percent_at_most(right: float, draft_cost: float, length: int) -> None:
    """Over many requests, long and short: what one of them tried is not tried again by each that follows."""
    worth, total, count = Worth(), 0.0, 3000 // length
    drafters = [drafter_of(worth) for _ in range(count)]
    for seed, drafter in enumerate(drafters):
        total += play(worth, drafter, right, draft_cost, length, seed)[0]
    assert total / count < 1.02


@pytest.mark.parametrize(("right", "draft_cost", "at_most"), [(0.95, 0.05, 0.25), (0.8, 0.05, 0.45), (0.7, 0.3, 0.9)])
def test_drafts_that_pay_are_made(right: float, draft_cost: float, at_most: float) -> None:
    worth = Worth()
    drafter = drafter_of(worth)
    assert play(worth, drafter, right, draft_cost, 1000)[0] < at_most
    assert drafter.stats().disabled_reason is None


def test_drafts_are_tried_again_where_an_answer_becomes_predictable() -> None:
    worth = Worth()
    drafter = drafter_of(worth)
    play(worth, drafter, 0.0, 0.3, 400)
    reason = drafter.stats().disabled_reason
    assert reason is not None
    assert "cost more than they saved: 0 of" in reason
    assert play(worth, drafter, 0.97, 0.1, 600)[0] < 0.5


def test_fixed_depth_asks_nobody() -> None:
    worth = Worth()
    drafter = drafter_of(worth, adaptive=False, depth=3)
    assert list(drafter.propose([1, 1], 1, 1, 1)) == [7, 7, 7]


def test_depth_falls_with_the_number_of_rows_that_share_a_step() -> None:
    """Alone a step reads the weights for one token; many rows have the machine busy already."""
    worth, sure = Worth(), Chance(0.9)
    for rows in (1, 8):
        for drafts in (*[0] * 4, *[8 if rows == 1 else 64] * 4):
            busy = 0.05 * drafts if rows == 1 else 0.12 * drafts
            worth.note_step(rows, drafts, drafts, rows**0.1 * (1 + busy))
    assert worth.depth(sure, 8, 1, 1) > worth.depth(sure, 8, 8, 8)


def test_a_first_step_that_was_slow_by_accident_is_not_held_against_drafts_for_ever() -> None:
    worth = Worth()
    for _ in range(4):
        worth.note_step(1, 0, 0, 1.0)
    for _ in range(4):
        worth.note_step(1, 1, 0, 60.0)
    drafter = drafter_of(worth)
    assert play(worth, drafter, 0.95, 0.05, 4000)[0] < 0.7


def test_costs_are_medians_and_what_was_not_seen_lies_between_what_was() -> None:
    costs = StepCosts()
    assert costs.plain_s(1) is None
    for seconds in (7.0, 8.0, 1.0, 9.0, 1.0, 1.0):
        costs.note(1, 0, seconds)
    assert costs.plain_s(1) == 1.0
    assert costs.ratio(1, 4) > 1.0
    costs.note(1, 2, 1.2)
    assert costs.ratio(1, 2) == pytest.approx(FIRST_GUESS + 2 * GUESS_PER_DRAFT), "one step may have made a recording"
    costs.note(1, 6, 9.0)
    for seconds in (9.0, 1.2, 1.2):
        costs.note(1, 2, seconds)
        costs.note(1, 6, seconds + 0.4)
    assert costs.ratio(1, 2) == pytest.approx(1.2)
    assert costs.ratio(1, 4) == pytest.approx(1.4)
    assert 1.1 <= costs.ratio(1, 1) < 1.2
    assert costs.ratio(1, 8) > 1.6
    for _ in range(4):
        costs.note(1, 3, 0.5)
    assert costs.ratio(1, 3) == 1.0, "drafts are never for nothing"


def test_first_chances_are_of_every_source() -> None:
    assert set(FIRST_CHANCES) == set(DRAFT_SOURCES)


class Measured(Worth):
    """Knows what pays without having seen anything."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def depth(self, chance: Chance, most: int, num_rows: int, num_drafting: int) -> int:
        return min(most, self._depth)


def test_head_leaves_its_drafts_open_and_is_asked_when_others_do_not_pay() -> None:
    failure: list[str] = []
    terms = MadeTerms(refusal=None, uncertified=True, failure=lambda: failure[0] if failure else None)
    sources: list[DraftSource] = [Always(), MadeSource("mtp", terms)]  # type: ignore[list-item]
    worths: dict[DraftSourceName, Worth] = {"ngram": Measured(0), "mtp": Measured(3)}
    drafter = Drafter(Speculation(sources=("ngram", "mtp")), sources, worths, {"mtp": terms})
    assert drafter.propose([1, 2, 3], 1, 1, 1) == [DRAFTED] * 3
    assert drafter.note(3, 2) == "mtp"
    assert drafter.stats().disabled_reason is None
    assert drafter.stats().uncertified
    failure.append("it broke")
    assert not drafter.propose([1, 2, 3, 4], 1, 1, 1)
    assert drafter.stats().disabled_reason == "it broke"


def test_head_drafts_at_most_eight_tokens_and_as_many_as_are_wanted() -> None:
    terms = MadeTerms(refusal=None)
    for depth, count in ((None, 8), (1, 1), (5, 5), (16, 8)):
        wanted = Speculation(sources=("mtp",), depth=depth, adaptive=False)
        assert (
            len(Drafter(wanted, [MadeSource("mtp", terms)], {"mtp": Worth()}, {"mtp": terms}).propose([1], 1, 1, 1))
            == count
        )
