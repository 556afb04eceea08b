"""Two engines on one disk cache: each is served what the other computed, and neither minds the end of the other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cpu.disk_world import TOPOLOGIES, text, world
from tests.cpu.test_laws import FAMILIES
from tests.cpu.tiny_models import load, random_model, save
from troth.models.family import Model


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    return lambda family: load(save(random_model(FAMILIES[family]), tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize("family", TOPOLOGIES)
def test_engines_on_one_folder_serve_each_other(models: Callable[[str], Model], tmp_path: Path, family: str) -> None:
    """Both are open all the time; a conversation moves from one to the other with each turn."""
    model = models(family)
    whole = text(1, 180, most=4)
    with world(model, tmp_path / "cold") as alone:
        expected = [alone.serve(replace(whole, prompt_ids=whole.prompt_ids[:end]))[0] for end in (60, 120, 180)]
    with world(model, tmp_path / "cache") as one, world(model, tmp_path / "cache") as other:
        for turn, (engine, end) in enumerate(((one, 60), (other, 120), (one, 180))):
            (answer,) = engine.serve(replace(whole, prompt_ids=whole.prompt_ids[:end]))
            assert answer.token_ids == expected[turn].token_ids
            assert answer.end.usage.num_cached_tokens >= max(0, 60 * turn - 31), "it comes from the other's files"
            while engine.disk.work():
                engine.disk.wait((), 0.05)
            engine.disk.wait((), 10.0)
        assert other.status.num_restored_tokens >= 32
        assert one.status.num_restored_tokens >= 32
        assert not one.status.trouble + other.status.trouble


def test_engines_that_are_killed_leave_nothing_wrong_for_others(tmp_path: Path) -> None:
    """A few of the 200 kills for which ``engine_killer.py`` is there."""
    path = save(random_model(FAMILIES["qwen3_5"]), tmp_path / "qwen3_5")
    command = [sys.executable, "-m", "tests.cpu.engine_killer", str(tmp_path / "killed"), "2", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("qwen3_5: 2 kills, ")
    assert " 0 tokens restored" not in done.stdout, "or nothing was proved"
