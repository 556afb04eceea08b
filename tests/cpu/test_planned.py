"""The plan of a model: at how many positions a step may draw, and that there is memory for their logits."""

from __future__ import annotations

import pytest

from tests.cpu.test_laws import FAMILIES
from tests.cpu.tiny_models import VOCAB, random_model, save
from tests.portable.test_scheduler import Loop, request
from tests.portable.test_scheduler_drafts import propose, right_answer
from troth.artifact.artifact import Artifact
from troth.artifact.resolve import resolve
from troth.config.facts import GpuFacts, MachineFacts
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.plan import StepPlan
from troth.run.assemble import scheduler_limits
from troth.run.planned import Planned, plan_model

GPU = GpuFacts(index=0, name="card", total_bytes=80 * 2**30, free_bytes=70 * 2**30, capability=(9, 0))
MACHINE = MachineFacts(num_cores=2, total_bytes=2**34, available_bytes=2**34, gpus=(GPU,))
LOGITS_BYTES = 3 * 4 * VOCAB
"""Of one position: scores before and after they are scaled, and their noise."""


@pytest.fixture(scope="module", name="artifact")
def _artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return resolve(save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("llama")))


def planned(artifact: Artifact, device: str, max_rows: int) -> Planned:
    return plan_model(artifact, ModelOptions(device=device), EngineOptions(max_rows=max_rows), MACHINE)


@pytest.mark.parametrize(
    ("device", "max_rows", "samples"),
    [
        ("cuda", 1, 64),
        ("cuda", 8, 64),
        ("cuda", 12, 96),
        ("cuda", 32, 256),
        ("cuda", 128, 256),
        ("cuda", 300, 300),
        ("cpu", 1, 64),
        ("cpu", 32, 64),
        ("cpu", 100, 100),
    ],
)
def test_plan_has_memory_for_the_logits_of_a_step_s_draws(
    artifact: Artifact, device: str, max_rows: int, samples: int
) -> None:
    fewest, plan = planned(artifact, device, 1), planned(artifact, device, max_rows)
    assert scheduler_limits(plan).max_samples == samples
    assert plan.plan.transient_bytes - fewest.plan.transient_bytes == (samples - 64) * LOGITS_BYTES
    assert fewest.plan.transient_bytes > 64 * LOGITS_BYTES


def test_a_planned_gpu_verifies_seven_drafts_of_each_of_32_rows_in_one_step(artifact: Artifact) -> None:
    loop = Loop(scheduler_limits(planned(artifact, "cuda", 32)))
    asked = [request(f"r{number}", 5, 30) for number in range(32)]
    for one in asked:
        loop.scheduler.add(one)
    while not all(loop.answers.get(one.request_id) for one in asked):
        loop.step()
    for one in asked:
        propose(loop.scheduler, one, right_answer(one, loop.scheduler.limits.groups), 7, 0)
    loop.step()
    plan = loop.plans[-1]
    assert isinstance(plan, StepPlan)
    assert plan.num_draft == [7] * 32
