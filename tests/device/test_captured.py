"""Steps with drafts, and passes that make them, as CUDA graphs: what they compute is what call by call is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import laws
from tests.cpu.captured_steps import Side, prompts, steps
from tests.cpu.draft_heads import save_with_head
from tests.cpu.test_head_drafts import requests as head_requests
from tests.cpu.test_laws import FAMILIES
from tests.cpu.test_model_drafts import DRAFT, TARGET
from tests.cpu.tiny_models import CONTEXT, random_model, save
from tests.device.engines import builder
from troth.artifact.resolve import resolve
from troth.contracts.cache_spec import attention_groups
from troth.contracts.request import Request
from troth.contracts.speculation import DraftSourceName, Speculation
from troth.models.family import Placement
from troth.models.registry import recognise
from troth.ops import registry
from troth.run.capture import cuda_capture

pytestmark = pytest.mark.device
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
GPU = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def _providers() -> Iterator[None]:
    registry.activate()
    yield
    registry.activate()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_with_drafts_compute_what_ordinary_ones_do(
    family: str, dtype: torch.dtype, limit: float, tmp_path: Path
) -> None:
    path = save(random_model(FAMILIES[family]), tmp_path)
    place = Placement(device=GPU, dtype=dtype, context_tokens=CONTEXT)
    model = recognise(resolve(path)).load(place)
    capture = cuda_capture()
    ordinary, captured = Side(model, capture, place), Side(model, capture, place)
    for side in (ordinary, captured):
        side.ordinary(prompts(len(attention_groups(model.config.cache_specs(dtype.itemsize)))))
    for plan in [*steps(), *steps()]:  # the second time, replays alone
        want, got = ordinary.ordinary(plan), captured.captured(plan)
        torch.testing.assert_close(got, want, rtol=limit, atol=limit)
        rows = [int(row) for row in plan.rows]
        for layer, tensors in ordinary.cache.states.items():
            for state, other in zip(tensors, captured.cache.states[layer], strict=True):
                torch.testing.assert_close(other[rows], state[rows], rtol=limit, atol=limit)
                assert not other[[1, 3]].any(), "a row that nobody computes has another state"
    assert len(captured.graphs._captured) == 1


def made(asked: list[Request], source: DraftSourceName) -> list[Request]:
    return [
        replace(one, speculation=Speculation(sources=(source,), depth=1 + number % 4, adaptive=False))
        if number != 1
        else replace(one, speculation=None)
        for number, one in enumerate(asked)
    ]


@pytest.mark.parametrize("source", ["mtp", "draft"])
def test_law_drafts_of_captured_passes_change_nothing(source: DraftSourceName, tmp_path: Path) -> None:
    """Rows of other depths and one of none, which come one after the other, twice: the second time from the cache."""
    if source == "mtp":
        build = builder(save_with_head(tmp_path), GPU, torch.float32, head=True)
    else:
        paths = [save(random_model(config), tmp_path / name) for name, config in (("t", TARGET), ("d", DRAFT))]
        build = builder(paths[0], GPU, torch.float32, draft_path=paths[1])
    asked = [replace(one, prompt_ids=one.prompt_ids) for one in head_requests(40, 3, 16, 70, 25, max_tokens=40)]
    off = [replace(one, speculation=None) for one in asked]
    wanted = laws.alone(build, off)
    loop, scheduler = build(laws.Serving(max_rows=4, prompt_cache=True))
    for _ in range(2):
        laws.assert_same(laws.serve_on(loop, scheduler, made(asked, source), stagger=1), wanted)
    stats = loop.status("ready", ()).speculation
    assert stats is not None
    assert stats.num_drafted > stats.num_accepted > 0
    runner = loop._runner
    assert runner.downgrades == ()  # type: ignore[attr-defined]
    proposer = runner._made._proposer  # type: ignore[attr-defined]
    passes = (proposer._graphs._first, proposer._graphs._next) if source == "mtp" else (proposer._passes,)
    for one in passes:
        assert one._recorded
        assert one.records, "what was captured did not run again as it did"


def test_drafts_of_captured_passes_are_those_of_the_cpu(tmp_path: Path) -> None:
    """As many are right, at every depth."""
    path = save_with_head(tmp_path)
    stats = []
    for device in (GPU, torch.device("cpu")):
        loop, scheduler = builder(path, device, torch.float32, head=True)(laws.Serving(max_rows=3))
        laws.serve_on(loop, scheduler, made(head_requests(40, 3, 16, 70, 25, max_tokens=40), "mtp"), stagger=1)
        stats.append(loop.status("ready", ()).speculation)
    assert stats[0] == stats[1]
