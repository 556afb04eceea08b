"""Answers that nobody reads before their end: the same in all but their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troth.contracts.events import Segment
from troth.contracts.names import RequestId
from troth.contracts.plan import TokenLogprobs
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.run.emit import Emission, Emitter
from troth.testing.byte_tokenizer import EOS_ID, ByteTokenizer

PLAIN = Request(request_id=RequestId("r"), prompt_ids=(1,), eos_ids=frozenset({EOS_ID}))
REQUESTS = {
    "plain": PLAIN,
    "stop": replace(PLAIN, stop=("ab",)),
    "logprobs": replace(PLAIN, sampling=SamplingParams(logprobs=1)),
    "special": replace(PLAIN, echo_special=True),
}


def answer(emitter: Emitter, groups: Sequence[Sequence[int]], *, cancelled: bool) -> list[Emission]:
    emissions = []
    for i, group in enumerate(groups):
        finish = "stop" if i == len(groups) - 1 and not cancelled else None
        logprobs = [TokenLogprobs(token_id, -0.5, 1) for token_id in group]
        emissions.append(emitter.push(group, logprobs, finish))
        if emissions[-1].finish is not None:
            return emissions
    return [*emissions, emitter.close()]


@pytest.mark.parametrize("name", REQUESTS)
@given(
    groups=st.lists(st.lists(st.integers(0, EOS_ID), min_size=1, max_size=4), min_size=1, max_size=6),
    cancelled=st.booleans(),
)
def test_answer_read_whole_is_what_its_parts_would_be(name: str, groups: list[list[int]], cancelled: bool) -> None:
    parts, whole = (
        answer(Emitter(REQUESTS[name], ByteTokenizer(), whole=whole), groups, cancelled=cancelled)
        for whole in (False, True)
    )
    assert (parts[-1].finish, parts[-1].num_emitted) == (whole[-1].finish, whole[-1].num_emitted)
    segments = [
        [event for emission in emissions for event in emission.events if isinstance(event, Segment)]
        for emissions in (parts, whole)
    ]
    assert "".join(s.text for s in segments[0]) == "".join(s.text for s in segments[1])
    assert [t for s in segments[0] for t in s.tokens] == [t for s in segments[1] for t in s.tokens]
    if name != "stop":
        assert len(segments[1]) <= 1
