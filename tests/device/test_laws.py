"""The laws on a GPU: captured decodes, tokens read one step late, the same answers as on the CPU in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import laws
from tests.cpu.test_laws import FAMILIES, requests
from tests.cpu.tiny_models import random_model, save
from tests.device.engines import builder
from troth.contracts.speculation import DraftSourceName
from troth.ops import registry
from troth.testing.byte_tokenizer import ByteTokenizer

pytestmark = pytest.mark.device
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def _providers() -> Iterator[None]:
    registry.activate()
    yield
    registry.activate()


@pytest.fixture(scope="module", params=FAMILIES, name="path")
def _path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES[request.param]), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", name="on_gpu")
def _on_gpu(path: Path) -> laws.BuildEngine:
    return builder(path, torch.device("cuda"), torch.float32)


def test_gpu_answers_as_the_cpu(path: Path, on_gpu: laws.BuildEngine) -> None:
    on_cpu = builder(path, torch.device("cpu"), torch.float32)
    laws.assert_same(laws.alone(on_gpu, requests()), laws.alone(on_cpu, requests()))


def speculation_on_equals_off(build: laws.BuildEngine) -> None:
    serving = laws.Serving(num_blocks=40, prompt_cache=True)
    stats, _ = laws.speculation_changes_nothing(build, requests(), serving, ("grammar", "external", "ngram"), 3)
    assert stats.num_drafted > stats.num_accepted > 0


LAWS: dict[str, Callable[[laws.BuildEngine], None]] = {
    "batched = single": lambda build: laws.batched_equals_single(build, requests()),
    "chunked = whole": lambda build: laws.chunked_equals_whole(build, requests()),
    "preempted = uninterrupted": lambda build: laws.preempted_equals_uninterrupted(
        build,
        [replace(one, prompt_ids=one.prompt_ids[:12], max_tokens=70, eos_ids=frozenset()) for one in requests()],
        laws.Serving(num_blocks=10),
    ),
    "stream = whole": lambda build: laws.stream_equals_whole(build, requests(), ByteTokenizer().decode),
    "speculation on = off": speculation_on_equals_off,
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
    # Where rounding decides between experts that are nearly as good, a token is computed by another one.
    has_experts = path.name.startswith(("qwen3_next", "qwen3_5_moe"))
    assert max(abs(a - b) for a, b in same) < (0.5 if has_experts else 0.25)


def test_law_speculation_changes_nothing_in_bfloat16_where_logits_are_equal(path: Path) -> None:
    build = builder(path, torch.device("cuda"), torch.bfloat16)
    sources: tuple[DraftSourceName, ...] = ("grammar", "external", "ngram")
    assert laws.speculation_changes_nothing_where_logits_are_equal(build, requests(), sources, 4) > 0
