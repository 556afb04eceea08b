"""The disk tier behind a whole engine: damage, refusals and delays change what is served from disk, never an answer."""

from __future__ import annotations

import errno
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import laws
from tests.cpu.disk_blocks import disk_cache
from tests.cpu.disk_world import CPU, TOPOLOGIES, text, world
from tests.cpu.test_laws import FAMILIES
from tests.cpu.tiny_models import load, random_model, save
from troth.cache import disk_folder
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.disk_names import cache_namespace
from troth.cache.disk_speed import DiskSpeed
from troth.cache.disk_tier import DiskTier
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups
from troth.contracts.events import Completed
from troth.contracts.names import RequestId
from troth.models.family import Model
from troth.schedule.admission import SchedulerLimits
from troth.schedule.replay import RecordingScheduler


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    loaded: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in loaded:
            loaded[family] = load(save(random_model(FAMILIES[family]), tmp_path_factory.mktemp(family)))
        return loaded[family]

    return get


@pytest.mark.parametrize(
    ("family", "damage"),
    [("llama", "flip"), ("gemma3", "flip"), ("qwen3_5", "flip"), ("llama", "cut"), ("qwen3_5", "remove")],
)
def test_disk_cache_serves_right_answers_from_damaged_files(
    models: Callable[[str], Model], tmp_path: Path, family: str, damage: str
) -> None:
    requests = [text(number) for number in range(3)]
    with world(models(family), tmp_path) as first:
        cold = first.serve(*requests)
    generator = random.Random(5)
    for path in sorted(tmp_path.rglob("*.safetensors"))[::2]:
        content = bytearray(path.read_bytes())
        if damage == "remove":
            path.unlink()
            continue
        content[generator.randrange(len(content))] ^= 1
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    with world(models(family), tmp_path) as second:
        laws.assert_same(second.serve(*requests), cold)
        assert not second.status.trouble
        assert damage == "remove" or second.status.num_damaged > 0
    with world(models(family), tmp_path) as third:
        laws.assert_same(third.serve(*requests), cold)
        assert third.status.num_damaged == 0, "damaged files were left"
        assert third.status.num_restores == {"restored": 3}


@pytest.mark.parametrize("family", TOPOLOGIES)
def test_disk_cache_restores_all_that_agrees(models: Callable[[str], Model], tmp_path: Path, family: str) -> None:
    """The next turn after a restart computes what it would have computed without one."""
    with world(models(family), tmp_path / "a") as one:
        cold = one.serve(text())
        following = replace(text(), prompt_ids=(*text().prompt_ids, *cold[0].token_ids, 1, 2), boundary=None)
        kept = one.serve(following)
    with world(models(family), tmp_path / "b") as before:
        before.serve(text())
    with world(models(family), tmp_path / "b") as after:
        restored = after.serve(following)
    laws.assert_same(restored, kept)
    assert restored[0].end.usage.num_cached_tokens == kept[0].end.usage.num_cached_tokens >= 144


def test_disk_cache_keeps_an_answer_that_ends_at_a_block_edge_as_the_engine_closes(
    models: Callable[[str], Model], tmp_path: Path
) -> None:
    """Such a row has one more step to go, and nobody waits for it."""
    one = text(num_tokens=148, most=12)
    with world(models("llama"), tmp_path) as before:
        collector = laws.Collector()
        before.loop.add(one, collector)
        while not collector.events or not isinstance(collector.events[-1], Completed):
            before.loop.step()
        answer = collector.answer()
        assert before.scheduler.states(), "the row has left already"
    with world(models("llama"), tmp_path) as after:
        following = replace(one, prompt_ids=(*one.prompt_ids, *answer.token_ids, 5))
        assert after.serve(following)[0].end.usage.num_cached_tokens == 160


def test_disk_cache_gives_nothing_to_another_namespace(models: Callable[[str], Model], tmp_path: Path) -> None:
    other = cache_namespace(artifact="b", dtype="float32", kv_dtype="float32", compute="cpu")
    with world(models("llama"), tmp_path) as first:
        cold = first.serve(text())
    with world(models("llama"), tmp_path, namespace=other) as second:
        salted = replace(text(), request_id=RequestId("s"))
        laws.assert_same(second.serve(salted), cold)
        assert second.status.num_restores == {"nothing": 1}
    with world(models("llama"), tmp_path) as third:
        laws.assert_same(third.serve(replace(text(), namespace="salt")), cold)
        assert third.status.num_restores == {"nothing": 1}
        laws.assert_same(third.serve(replace(text(), prompt_cache=False)), cold)
        assert third.status.num_restores == {"nothing": 1}


def test_disk_cache_in_a_folder_that_cannot_be_used_says_so(models: Callable[[str], Model], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with world(models("llama"), tmp_path / "file" / "cache") as one:
        first = one.serve(text())
        laws.assert_same(one.serve(text()), first)
        assert "cannot be used" in one.disk.downgrades[0]


def test_disk_cache_on_a_full_disk_says_so_and_still_reads(
    models: Callable[[str], Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(models("llama"), tmp_path) as before:
        cold = before.serve(text())

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_folder, "write_bundle", full)
    with world(models("llama"), tmp_path) as one:
        one.serve(text(1))
        laws.assert_same(one.serve(text()), cold)
        assert "No space left" in one.disk.downgrades[0]
        assert one.status.num_restores["restored"] == 1


def test_disk_cache_reads_a_shared_beginning_once(models: Callable[[str], Model], tmp_path: Path) -> None:
    requests = [
        replace(text(), request_id=RequestId(f"s{i}"), prompt_ids=(*text().prompt_ids, i, i)) for i in (1, 2, 3)
    ]
    with world(models("llama"), tmp_path) as before:
        before.serve(text())
    with world(models("llama"), tmp_path) as after:
        answers = after.serve(*requests)
        assert after.status.num_restores == {"restored": 1, "known": 2}
        assert [answer.end.usage.num_cached_tokens for answer in answers] == [144] * 3


def test_disk_cache_computes_what_is_slower_to_read(models: Callable[[str], Model], tmp_path: Path) -> None:
    with world(models("llama"), tmp_path) as before:
        cold = before.serve(text())
    with world(models("llama"), tmp_path) as after:
        after.disk.note_prefill(10**6, 1e-3)
        laws.assert_same(after.serve(text()), cold)
        assert after.status.num_restores == {"slower": 1}


@pytest.mark.parametrize(("bytes_per_s", "outcome"), [(100, "slower"), (10**9, "restored")])
def test_disk_cache_knows_from_the_start_whether_reading_beats_computing(
    models: Callable[[str], Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_s: int, outcome: str
) -> None:
    """The first request after a start was always read for, however slow the disk."""
    with world(models("llama"), tmp_path) as before:
        cold = before.serve(text())
    monkeypatch.setattr(DiskSpeed, "probe", lambda speed, scratch: speed.note(bytes_per_s, 1.0))
    with world(models("llama"), tmp_path) as after:
        after.disk.note_prefill(64, 64.0)
        while not after.status.read_bytes_per_s:
            time.sleep(0.001)
        laws.assert_same(after.serve(text()), cold)
        assert after.status.num_restores == {outcome: 1}


def test_disk_cache_makes_nobody_wait_longer_than_computing_takes(
    models: Callable[[str], Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(models("llama"), tmp_path) as before:
        cold = before.serve(text())
    go, read = threading.Event(), DiskTier.read

    def slow(*arguments: Any) -> Any:
        go.wait(20)
        return read(*arguments)

    monkeypatch.setattr(DiskTier, "read", slow)
    monkeypatch.setattr("troth.run.disk_restore.LONGEST_WAIT_S", 0.05)
    with world(models("llama"), tmp_path) as after:
        laws.assert_same(after.serve(text()), cold)
        assert after.status.num_restores == {"late": 1}
        go.set()
        laws.assert_same(after.serve(text(1)), [after.serve(text(1))[0]])


def test_disk_cache_gives_back_what_a_cancelled_request_waited_for(
    models: Callable[[str], Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(models("gemma3"), tmp_path) as before:
        before.serve(text())
    go, read = threading.Event(), DiskTier.read

    def slow(*arguments: Any) -> Any:
        go.wait(20)
        return read(*arguments)

    monkeypatch.setattr(DiskTier, "read", slow)
    with world(models("gemma3"), tmp_path) as after:
        after.loop.add(text(), laws.Collector())
        for _ in range(1000):
            after.loop.step()
            if after.scheduler.reservations():
                break
        assert after.scheduler.reservations()
        after.loop.cancel(text().request_id, "requested")
        go.set()
        while after.loop.step():
            pass
        assert after.scheduler.is_idle
        assert all(pool.num_used == 0 for pool in after.scheduler.pools)


def test_disk_cache_forgets_the_text_of_a_row_that_failed(models: Callable[[str], Model], tmp_path: Path) -> None:
    with world(models("llama"), tmp_path) as before:
        before.serve(text(), text(1))
        while before.disk.work():
            before.disk.wait((), 0.01)
        before.disk.withdraw(text())
    with world(models("llama"), tmp_path) as after:
        after.serve(text(), text(1))
        assert after.status.num_restores == {"nothing": 1, "restored": 1}


def test_disk_cache_lets_the_caches_go_when_it_closes(models: Callable[[str], Model], tmp_path: Path) -> None:
    """Its status is still told afterwards, and must not keep gigabytes alive for it."""
    specs = models("qwen3_5").config.cache_specs(4)
    cache = CacheStorage(specs, (20,), 2, dtype=torch.float32, device=CPU)
    checkpoints = CheckpointStorage(cache, 3)
    limits = SchedulerLimits(
        groups=attention_groups(specs),
        num_blocks=(20,),
        max_rows=2,
        max_waiting=1,
        chunk_tokens=16,
        step_tokens=16,
        context_tokens=64,
        prompt_cache=True,
        num_checkpoints=3,
    )
    disk = disk_cache(tmp_path, RecordingScheduler(limits, lambda line: None), cache, checkpoints)
    watched = [weakref.ref(cache), weakref.ref(checkpoints), weakref.ref(next(iter(cache.kv.values())).k_NKDS)]
    disk.close()
    del cache, checkpoints
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3
    assert disk.status().folder == str(tmp_path)


def test_disk_cache_keeps_room_for_rows_that_run(models: Callable[[str], Model], tmp_path: Path) -> None:
    """Pools too small for everybody: what does not fit is computed, and nobody is preempted for it."""
    requests = [text(number, num_tokens=100, most=20) for number in range(5)]
    with world(models("llama"), tmp_path) as before:
        cold = before.serve(*requests)
    with world(models("llama"), tmp_path, num_blocks=(18,)) as after:
        laws.assert_same(after.serve(*requests, stagger=1), cold)
        assert sum(after.status.num_restores.values()) == 5
        assert after.status.num_restores["restored"] >= 1
