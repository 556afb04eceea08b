"""The laws on a GPU: captured decodes, tokens read one step late, the same answers as on the CPU in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from tests import laws
from tests.cpu.test_laws import FAMILIES, requests
from tests.cpu.tiny_models import CONTEXT, VOCAB, random_model, save
from troth.artifact.resolve import resolve
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups
from troth.models.family import Placement
from troth.models.registry import recognise
from troth.ops import registry
from troth.run.decode_steps import pipeline_depth, step_builders
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.runner import ModelRunner
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.grammar import GrammarCompiler

pytestmark = pytest.mark.device
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def _providers() -> Iterator[None]:
    registry.activate()
    yield
    registry.activate()


def builder(path: Path, device: torch.device, dtype: torch.dtype) -> laws.BuildEngine:
    """Builds engines over one model, with the steps that its device has."""
    model = recognise(resolve(path)).load(Placement(device=device, dtype=dtype, context_tokens=CONTEXT))
    specs = model.config.cache_specs(dtype.itemsize)
    groups = attention_groups(specs)
    compiler = GrammarCompiler(ByteTokenizer(), VOCAB)

    def build(serving: laws.Serving) -> tuple[EngineLoop, Scheduler]:
        limits = serving.limits(specs, CONTEXT)
        cache = CacheStorage(specs, limits.num_blocks, serving.max_rows, dtype=dtype, device=device)
        scheduler = Scheduler(limits)
        batches, decodes = step_builders(
            model, cache, groups, max_rows=serving.max_rows, context_tokens=CONTEXT, device=device
        )
        grammars = RowGrammars(compiler)
        checkpoints = CheckpointStorage(cache, serving.num_checkpoints)
        runner = ModelRunner(model, cache, batches, decodes, checkpoints, grammars)
        ticks = count()
        loop = EngineLoop(
            scheduler,
            runner,
            ByteTokenizer(),
            clock=lambda: float(next(ticks)),
            pipeline_depth=pipeline_depth(device),
            grammars=grammars,
        )
        if device.type == "cuda" and not cache.states:
            assert decodes is not None
            assert decodes.refusal is None
        return loop, scheduler

    return build


@pytest.fixture(scope="module", params=FAMILIES, name="path")
def _path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES[request.param]), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", name="on_gpu")
def _on_gpu(path: Path) -> laws.BuildEngine:
    return builder(path, torch.device("cuda"), torch.float32)


def test_gpu_answers_as_the_cpu(path: Path, on_gpu: laws.BuildEngine) -> None:
    on_cpu = builder(path, torch.device("cpu"), torch.float32)
    laws.assert_same(laws.alone(on_gpu, requests()), laws.alone(on_cpu, requests()))


LAWS: dict[str, Callable[[laws.BuildEngine], None]] = {
    "batched = single": lambda build: laws.batched_equals_single(build, requests()),
    "chunked = whole": lambda build: laws.chunked_equals_whole(build, requests()),
    "preempted = uninterrupted": lambda build: laws.preempted_equals_uninterrupted(
        build,
        [replace(one, prompt_ids=one.prompt_ids[:12], max_tokens=70, eos_ids=frozenset()) for one in requests()],
        laws.Serving(num_blocks=10),
    ),
    "stream = whole": lambda build: laws.stream_equals_whole(build, requests(), ByteTokenizer().decode),
}


@pytest.mark.parametrize("law", LAWS)
def test_law_holds_on_the_gpu(on_gpu: laws.BuildEngine, law: str) -> None:
    LAWS[law](on_gpu)


def test_bfloat16_log_probabilities_are_near_those_of_float32(path: Path, on_gpu: laws.BuildEngine) -> None:
    """The first token of each answer: later ones follow from other tokens once one differs."""
    rough = builder(path, torch.device("cuda"), torch.bfloat16)
    asked = [replace(one, max_tokens=1, grammar=None) for one in requests()]
    pairs = zip(laws.alone(rough, asked), laws.alone(on_gpu, asked), strict=True)
    same = [(a.logprobs[0], b.logprobs[0]) for a, b in pairs if a.token_ids == b.token_ids]
    assert len(same) >= len(asked) // 2
    assert max(abs(a - b) for a, b in same) < 0.25
