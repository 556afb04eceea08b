"""Stages of a load, by a clock that the test moves."""

from __future__ import annotations

from troth.contracts.progress import stages_text
from troth.run.load_times import LoadTimes


def test_load_times_pass_progress_on_and_tell_every_stage_s_seconds() -> None:
    now, seen = 100.0, list[tuple[str, int, int]]()
    times = LoadTimes(lambda stage, done, total: seen.append((stage, done, total)), lambda: now)
    now += 0.5
    for done in range(3):
        times("reading weights", done, 2)
        now += 1.0
    times("warming up", 0, 1)
    now += 0.25
    times("reading weights", 1, 1)
    now += 0.01
    stages = times.finish()
    assert seen == [("reading weights", done, 2) for done in range(3)] + [
        ("warming up", 0, 1),
        ("reading weights", 1, 1),
    ]
    assert list(stages) == ["preparing", "reading weights", "warming up"]
    assert [round(seconds, 6) for seconds in stages.values()] == [0.5, 3.01, 0.25]


def test_stages_text_leaves_out_what_takes_no_time() -> None:
    assert stages_text({"preparing": 0.04, "reading weights": 3.14, "warming up": 0.1}) == (
        "reading weights 3.1 s, warming up 0.1 s"
    )
