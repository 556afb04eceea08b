"""Products of weights that were rounded at load, on a GPU. Caches of codes: ``test_ops.py``, ``test_invariant.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import laws
from tests.cpu.op_cases import assert_close
from tests.cpu.test_laws import FAMILIES, requests
from tests.cpu.tiny_models import random_model, save
from tests.device.engines import builder
from troth.config.resolve import FP8_CAPABILITY
from troth.ops import registry
from troth.ops.codes import FP8, to_codes
from troth.ops.grid import Inputs
from troth.ops.linear import RawLinearWeight, linear, pack, random_weight

pytestmark = pytest.mark.device
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < FP8_CAPABILITY:
    pytest.skip("needs a CUDA device that knows fp8", allow_module_level=True)
GPU = torch.device("cuda")
SHAPES = ((6144, 4096), (4096, 12288), (48, 1024), (130, 576))
"""Outputs and inputs; the last is one that PyTorch's product does not take."""


@pytest.fixture(scope="module", autouse=True)
def _providers() -> Iterator[None]:
    registry.activate()
    yield
    registry.activate()


@pytest.fixture(scope="module", name="path")
def _path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES["qwen3"]), tmp_path_factory.mktemp("qwen3"))


def test_fp8_weights_give_log_probabilities_near_those_of_bfloat16(path: Path) -> None:
    """The first token of each answer: later ones follow from other tokens once one differs."""
    asked = [replace(one, max_tokens=1, grammar=None) for one in requests()]
    rounded = laws.alone(builder(path, GPU, torch.bfloat16, weights="fp8"), asked)
    pairs = zip(rounded, laws.alone(builder(path, GPU, torch.bfloat16), asked), strict=True)
    same = [(a.logprobs[0], b.logprobs[0]) for a, b in pairs if a.token_ids == b.token_ids]
    assert len(same) >= len(asked) // 2
    assert max(abs(a - b) for a, b in same) < 0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 32, 33, 300])
def test_products_of_codes_equal_the_reference(shape: tuple[int, int], num_tokens: int) -> None:
    """By every kernel that multiplies them: one token, a few, many."""
    inputs = Inputs(torch.bfloat16, GPU)
    raw = RawLinearWeight((random_weight(inputs, "FP8", shape),))
    x_TI, bias_O = inputs.normal(num_tokens, shape[1]), inputs.normal(shape[0])
    assert_close(
        linear, linear(x_TI, pack(raw.parts, torch.bfloat16, GPU), bias_O), linear.reference(x_TI, raw, bias_O)
    )


def test_weights_are_rounded_alike_on_both_devices() -> None:
    weight = Inputs(torch.bfloat16, torch.device("cpu")).normal(64, 576)
    here_OI, here_O = to_codes(weight, FP8)
    there_OI, there_O = to_codes(weight.to(GPU), FP8)
    assert torch.equal(here_O, there_O.cpu())
    assert torch.equal(here_OI.view(torch.uint8), there_OI.cpu().view(torch.uint8))
