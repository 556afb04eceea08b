"""The benchmark that tells a draft head what to draft: as many drafts are right as it says, and no answer changes."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from benchmarks.engine.forced_drafts import Engine
from benchmarks.random_model import write
from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.contracts.speculation import Speculation

DEPTH, TOKENS = 3, 40


def right_drafts(answer: list[int], told: list[int]) -> list[int]:
    """How many drafts each step verifies with success, from the first token on."""
    found, place = list[int](), 1
    while place < len(answer):
        right, most = 0, min(DEPTH, len(answer) - place - 1)
        while right < most and told[place + right] == answer[place + right]:
            right += 1
        found.append(right)
        place += right + 1
    return found


def test_forced_drafts_are_right_as_told_and_change_no_answer(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3.5-tiny")
    engine = Engine(Namespace(model=str(folder), device="cpu", context=256, rows=[2]))
    requests = [
        Request(
            request_id=RequestId(f"r{number}"),
            prompt_ids=tuple(range(5 + number, 30 + number)),
            max_tokens=TOKENS,
            sampling=SamplingParams(temperature=0.0),
            prompt_cache=False,
        )
        for number in range(2)
    ]
    wanted, _, _ = engine.serve(requests)
    assert wanted == [[*range(30 + number, 30 + number + TOKENS)] for number in range(2)]
    known = {one.request_id: token_ids for one, token_ids in zip(requests, wanted, strict=True)}
    engine.forced.tell(known, 0.6)
    way = Speculation(sources=("mtp",), depth=DEPTH, adaptive=False)
    assert engine.serve([replace(one, speculation=way) for one in requests])[0] == wanted
    stats = engine.loop.status("ready", ()).speculation
    assert stats is not None
    right = [right_drafts(answer, engine.forced.told[request_id]) for request_id, answer in known.items()]
    assert stats.num_accepted == sum(map(sum, right))
    assert stats.num_drafted > stats.num_accepted > 0
    engine.loop.close()
