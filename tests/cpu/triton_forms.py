"""In how many forms the Triton kernels are compiled, found without a GPU and without compiling; run by
``test_op_triton.py``.

A launch only works out the key of the compiled form, as Triton does, and none of its numbers: engines over it go
through their steps with NaN everywhere. A process of its own, in which the kernels take CPU tensors.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from troth.ops.impl import triton as kernels

kernels.INTERPRETED = True  # type: ignore[misc]  # before the kernels' modules are imported

from benchmarks.random_model import SHAPES, write  # noqa: E402
from tests.laws import Serving  # noqa: E402
from troth.artifact.resolve import resolve  # noqa: E402
from troth.cache.checkpoints import CheckpointStorage  # noqa: E402
from troth.cache.storage import CacheStorage  # noqa: E402
from troth.contracts.cache_spec import attention_groups  # noqa: E402
from troth.contracts.events import Event, Failed  # noqa: E402
from troth.contracts.names import RequestId  # noqa: E402
from troth.contracts.request import Request  # noqa: E402
from troth.contracts.sampling import SamplingParams  # noqa: E402
from troth.models.family import Model, Placement  # noqa: E402
from troth.models.registry import recognise  # noqa: E402
from troth.ops import registry  # noqa: E402
from troth.run.device_batch import DeviceBatches  # noqa: E402
from troth.run.engine import EngineLoop  # noqa: E402
from troth.run.first_kernels import FirstLaunches  # noqa: E402
from troth.run.graphs import DecodeGraphs  # noqa: E402
from troth.run.rehearsal import rehearsal  # noqa: E402
from troth.run.runner import ModelRunner  # noqa: E402
from troth.run.step_cost import StepTrial  # noqa: E402
from troth.run.warmup import warm_up  # noqa: E402
from troth.schedule.scheduler import Scheduler  # noqa: E402
from troth.testing.byte_tokenizer import ByteTokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")
CPU = torch.device("cpu")
CONTEXT, ROWS, STEP = 2048, 20, 1024


class Hopper:
    """What Triton asks its driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


FORMS: dict[tuple[str, ...], tuple[str, ...]] = {}
"""Each form that was launched -> what of it is decided by the model and a step's shapes: all but what is known of
numbers and addresses."""


def _noted(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    binder = self.device_caches[0][-1]
    bound, form, given = binder(*args, **options)
    kinds = [str(known if p.is_constexpr else known[0]) for p, known in zip(self.params, form, strict=True)]
    kinds = ["i32" if kind == "constexpr" else kind for kind in kinds]  # a number that is 1
    named = (self.__name__, *map(str, sorted(given.items())))
    FORMS[*named, *map(str, form)] = (*named, *kinds)
    if self.__name__ == "_finite_rows":
        bound["y"].fill_(True)
    if self.__name__ == "_best_of_row":
        bound["tokens"].fill_(7)


driver.set_active(Hopper())
JITFunction.run = _noted


def spoilt(run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """A capture whose replay leaves what the steps here leave."""
    results = run()

    def replay() -> None:
        for result in results:
            result.fill_(torch.nan)

    return replay, results


class Sink:
    last_read = 0.0

    def offer(self, event: Event) -> bool:
        assert not isinstance(event, Failed), event
        return True


def loaded(folder: Path, providers: tuple[str, ...]) -> Model:
    registry.activate(providers)
    return recognise(resolve(folder)).load(Placement(device=CPU, dtype=torch.bfloat16, context_tokens=CONTEXT))


def warmed(model: Model) -> EngineLoop:
    """An engine as on a GPU, warm, but for what it does when it is idle."""
    specs = model.config.cache_specs(2)
    groups = attention_groups(specs)
    limits = Serving(
        max_rows=ROWS, chunk_tokens=STEP, step_tokens=STEP, num_blocks=ROWS * CONTEXT // 16 + 1, prompt_cache=True
    ).limits(specs, CONTEXT)
    cache = CacheStorage(specs, limits.num_blocks, ROWS, dtype=torch.bfloat16, device=CPU)
    batches = DeviceBatches(groups, ROWS, CONTEXT, CPU)
    graphs = DecodeGraphs(model, cache, batches, spoilt, max_rows=ROWS, context_tokens=CONTEXT)
    checkpoints = CheckpointStorage(cache, limits.num_checkpoints) if limits.num_checkpoints else None
    runner = ModelRunner(model, cache, batches, graphs, checkpoints)
    warm_up(runner, limits, ByteTokenizer(), 1)
    assert graphs.refusal is None
    return EngineLoop(Scheduler(limits), runner, ByteTokenizer(), clock=time.monotonic, pipeline_depth=1)


def rehearse(model: Model) -> None:
    """As an idle engine."""
    specs = model.config.cache_specs(2)
    groups = attention_groups(specs)
    cache = CacheStorage(specs, (1,) * len(groups), ROWS, dtype=torch.bfloat16, device=CPU)
    for _ in rehearsal(
        model,
        cache,
        groups,
        max_rows=ROWS,
        context_tokens=CONTEXT,
        step_tokens=STEP,
        dtype=torch.bfloat16,
        device=CPU,
    ):
        pass


SHAPES_AND_PROVIDERS = pytest.mark.parametrize(
    ("shape", "providers"),
    [
        ("qwen3-tiny", ("triton", "torch")),
        ("qwen3-tiny", ("invariant", "triton", "torch")),
        ("qwen3.5-tiny", ("triton", "torch")),
    ],
    ids=["plain", "deterministic", "recurrent"],
)


@SHAPES_AND_PROVIDERS
def test_what_a_load_launches_is_compiled_side_by_side_before(
    shape: str, providers: tuple[str, ...], tmp_path: Path
) -> None:
    """The step that is measured and the requests that are answered first meet no form that was not among those."""
    FORMS.clear()
    model = loaded(write(tmp_path, shape), providers)
    specs = model.config.cache_specs(2)
    with torch.inference_mode():
        for launch in FirstLaunches(
            model,
            specs,
            max_rows=ROWS,
            context_tokens=CONTEXT,
            step_tokens=STEP,
            dtype=torch.bfloat16,
            kv_dtype=torch.bfloat16,
            device=CPU,
        ):
            launch()
    known = FORMS.copy()
    FORMS.clear()
    StepTrial(model, specs, max_samples=64, kv_dtype=torch.bfloat16, device=CPU).measure(STEP)
    warmed(model)
    assert len({name for name, *_ in FORMS}) > 8, "these are not the kernels that a load launches"
    assert not sorted(FORMS.keys() - known.keys())
    assert len(known.keys() - FORMS.keys()) <= 3, "kernels are compiled that nobody launches"


@SHAPES_AND_PROVIDERS
def test_no_request_meets_a_kernel_in_a_form_that_is_not_compiled_yet(
    shape: str, providers: tuple[str, ...], tmp_path: Path
) -> None:
    """Prompts of any length, alone and beside others, short and long tables, greedy and drawn."""
    FORMS.clear()
    model = loaded(write(tmp_path, shape), providers)
    loop = warmed(model)
    rehearse(model)
    known, draw = FORMS.copy(), random.Random(5)
    assert len({name for name, *_ in known}) > 8, "these are not the kernels that the engine runs"
    lengths = [*range(1, 10), 12, 15, 17, 31, 33, 64, 65, 100, 130, 300, 600, 1100, 1900]
    draw.shuffle(lengths)
    for number, length in enumerate(lengths):
        loop.add(
            Request(
                request_id=RequestId(str(number)),
                prompt_ids=tuple(draw.randrange(SHAPES[shape]["vocab_size"]) for _ in range(length)),
                max_tokens=draw.randint(1, 6),
                sampling=SamplingParams(temperature=float(number % 2), seed=number),
            ),
            Sink(),
        )
        for _ in range(draw.choice([0, 0, 1, 4, 25])):
            loop.step()
    while loop.step():
        pass
    late = sorted(FORMS.keys() - known.keys())
    assert not late, "\n".join(map(str, late))
    # Two: a width is a multiple of 16 in one layer and not in another.
    often = {kinds: forms for kinds, forms in Counter(FORMS.values()).items() if forms > 2}
    assert not often, f"a number or an address that varies is part of a form: {often}"
