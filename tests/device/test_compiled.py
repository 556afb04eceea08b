"""No request waits for a compiler: what an engine launches was compiled while it was idle."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import troth
from benchmarks.random_model import SHAPES, write
from troth.config.options import EngineOptions, ModelOptions
from troth.ops import registry
from troth.ops.impl import triton as kernels

REASON = kernels.unavailable()
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(REASON is not None or kernels.INTERPRETED, reason=f"there is no GPU: {REASON}"),
]
ROWS = 20
LONGEST = 600


@pytest.fixture(autouse=True)
def _providers() -> Iterator[None]:
    yield
    registry.activate()


def compiled() -> Counter[str]:
    """Forms in which each kernel is compiled now."""
    from triton.runtime.jit import JITFunction

    found: Counter[str] = Counter()
    modules = [module for name, module in sys.modules.items() if name.startswith("troth.ops.impl.triton")]
    for module in modules:
        for value in vars(module).values():
            # Modules share functions by importing them: each counts where it was written.
            if isinstance(value, JITFunction) and value.__module__ == module.__name__:
                forms = sum(len(caches[0]) for caches in value.device_caches.values())
                found[f"{module.__name__}.{value.__name__}"] = forms
    return found


@pytest.mark.parametrize(
    ("shape", "model", "engine"),
    [
        ("qwen3-tiny", {}, {}),
        ("qwen3-tiny", {"kv_dtype": "int8", "weights": "fp8"}, {}),
        ("qwen3-tiny", {}, {"deterministic": True}),
        ("qwen3.5-tiny", {}, {}),
    ],
    ids=["plain", "codes", "deterministic", "recurrent"],
)
def test_requests_of_any_length_compile_no_kernel(
    shape: str, model: dict[str, str], engine: dict[str, bool], tmp_path: Path
) -> None:
    """Prompts of 1 to 600 tokens, of 1 to 20 rows, greedy and drawn, some from the prompt cache; no drafts."""
    draw = random.Random(3)
    vocabulary = SHAPES[shape]["vocab_size"]
    prompts = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, LONGEST))] for _ in range(60)]
    prompts += [[draw.randrange(vocabulary) for _ in range(length)] for length in range(1, 20)]
    options = ModelOptions(device="cuda", context_tokens=1500, **model)  # type: ignore[arg-type]
    with troth.Engine.open(
        str(write(tmp_path, shape)),
        model_options=options,
        engine_options=EngineOptions(max_rows=ROWS, kv_memory_bytes=2**28, **engine),
    ) as served:
        while not served.has_rehearsed:
            time.sleep(0.1)
        before = compiled()
        for number, count in enumerate((1, 2, 3, 5, 9, 17, ROWS, 40)):
            asked = draw.sample(prompts, count)
            asked += [[*prompt[: len(prompt) * 2 // 3], 7, 8] for prompt in asked[: count // 3]]
            how = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}][
                number % 3
            ]
            served.complete_all(asked, max_tokens=draw.randint(2, 40), ignore_eos=True, **how)
        late = compiled() - before
    torch.cuda.synchronize()
    assert sum(before.values()) > 15, "these are not the kernels that the engine runs"
    assert not late
