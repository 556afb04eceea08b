"""The disk tier behind a whole engine: damage, refusals and delays change what is served from disk, never an answer."""

from __future__ import annotations

import errno
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import laws
from tests.cpu.disk_blocks import NAMESPACE, disk_cache
from tests.cpu.test_laws import FAMILIES
from tests.cpu.tiny_models import CONTEXT, CPU, load, random_ids, random_model, save
from troth.cache import disk_folder
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.disk_names import cache_namespace
from troth.cache.disk_tier import DiskTier
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups, recurrent_bytes
from troth.contracts.events import Completed
from troth.contracts.names import RequestId
from troth.contracts.prefix_cache import DiskCacheStatus
from troth.contracts.request import Request
from troth.contracts.sampling import SamplingParams
from troth.models.family import Model
from troth.run.batch import BatchBuilder
from troth.run.disk_cache import DiskCache
from troth.run.engine import EngineLoop
from troth.run.runner import ModelRunner
from troth.schedule.admission import SchedulerLimits
from troth.schedule.replay import RecordingScheduler, replay
from troth.testing.byte_tokenizer import ByteTokenizer

TOPOLOGIES = ("llama", "gemma3", "qwen3_5")
"""Full attention, sliding windows, recurrent state."""


@dataclass
class World:
    """One engine with a disk tier, and the trace of its scheduler."""

    loop: EngineLoop
    scheduler: RecordingScheduler
    disk: DiskCache
    lines: list[str] = field(default_factory=list)

    @property
    def status(self) -> DiskCacheStatus:
        return self.disk.status()

    def serve(self, *requests: Request, stagger: int = 0) -> list[laws.Answer]:
        return laws.serve_on(self.loop, self.scheduler, requests, stagger=stagger)


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    loaded: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in loaded:
            loaded[family] = load(save(random_model(FAMILIES[family]), tmp_path_factory.mktemp(family)))
        return loaded[family]

    return get


@contextmanager
def world(model: Model, folder: Path, *, namespace: str = NAMESPACE, **changes: Any) -> Iterator[World]:
    specs = model.config.cache_specs(4)
    groups = attention_groups(specs)
    values: dict[str, Any] = {"num_blocks": (200,) * len(groups), "max_rows": 4, "max_waiting": 64} | changes
    lines: list[str] = []
    num_checkpoints = None if recurrent_bytes(specs) is None else 32
    limits = SchedulerLimits(
        groups=groups,
        chunk_tokens=64,
        step_tokens=64,
        context_tokens=CONTEXT,
        prompt_cache=True,
        num_checkpoints=num_checkpoints,
        checkpoint_interval_tokens=32,
        **values,
    )
    cache = CacheStorage(specs, limits.num_blocks, limits.max_rows, dtype=torch.float32, device=CPU)
    scheduler = RecordingScheduler(limits, lines.append)
    checkpoints = CheckpointStorage(cache, num_checkpoints or 0)
    disk = disk_cache(folder, scheduler, cache, checkpoints, namespace)
    runner = ModelRunner(model, cache, BatchBuilder(groups, limits.max_rows, CONTEXT), checkpoints=checkpoints)
    loop = EngineLoop(scheduler, runner, ByteTokenizer(), clock=lambda: 0.0, disk=disk)
    try:
        yield World(loop, scheduler, disk, lines)
    finally:
        loop.close()
    assert replay(lines) == len(lines) - 1


def text(number: int = 0, num_tokens: int = 150, most: int = 12, name: str = "r") -> Request:
    return Request(
        request_id=RequestId(f"{name}{number}"),
        prompt_ids=tuple(random_ids(num_tokens, seed=number)),
        max_tokens=most,
        sampling=SamplingParams(temperature=0, logprobs=0),
        boundary=num_tokens - 3,
        checkpoint_positions=(40,),
    )


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
