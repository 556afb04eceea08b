"""Deterministic engines: the same bits, whatever a request is computed beside. Log-probabilities are compared by ==."""

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
from troth.ops import registry
from troth.ops.attention import attention, paged_kv
from troth.ops.grid import Inputs, RowSpec, rows_of
from troth.ops.linear import linear, pack, random_weight
from troth.ops.rotary_kv_write import HeadNorms, RotaryTable, rotary_kv_write

pytestmark = pytest.mark.device
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
GPU = torch.device("cuda")
DENSE = ("llama", "qwen3", "gemma3")
"""Plain, with head norms, with windows; families with recurrent layers are refused."""


@pytest.fixture(scope="module", autouse=True)
def _invariant() -> Iterator[None]:
    registry.activate(("invariant", *registry.default_order()))
    yield
    registry.activate()


@pytest.fixture(autouse=True)
def _exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but 0 is below the least float."""
    monkeypatch.setattr(laws, "LOGPROB_LIMIT", 5e-324)


def growing() -> list[laws.Request]:
    return [replace(one, prompt_ids=one.prompt_ids[:12], max_tokens=70, eos_ids=frozenset()) for one in requests()]


LAWS: dict[str, Callable[[laws.BuildEngine], None]] = {
    "batched = single": lambda build: laws.batched_equals_single(build, requests()),
    "chunked = whole": lambda build: laws.chunked_equals_whole(build, requests()),
    "preempted = uninterrupted": lambda build: laws.preempted_equals_uninterrupted(
        build, growing(), laws.Serving(num_blocks=10)
    ),
    "prefix hit = cold": lambda build: laws.prefix_hit_equals_cold(build, requests(), laws.Serving()),
}


@pytest.fixture(scope="module", params=DENSE, name="path")
def _path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES[request.param]), tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("law", LAWS)
def test_law_holds_bit_for_bit_in_bfloat16(path: Path, law: str) -> None:
    LAWS[law](builder(path, GPU, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "width"), [(4096, 4096), (6144, 4096), (200, 576)])
def test_a_token_s_product_is_the_same_bits_among_any_number(dtype: torch.dtype, outputs: int, width: int) -> None:
    inputs = Inputs(dtype, GPU)
    weight = pack([random_weight(inputs, "BF16", (outputs, width))], dtype, GPU)
    x_TI, bias_O = inputs.normal(2100, width), inputs.normal(outputs)
    every = linear(x_TI, weight, bias_O)
    for count in (1, 2, 16, 20, 33, 64, 100, 128, 129, 500, 1025):
        first = 2100 - count
        assert torch.equal(linear(x_TI[first:], weight, bias_O), every[first:]), count


@pytest.mark.parametrize(("heads", "window"), [((32, 8, 128), None), ((32, 8, 128), 700), ((8, 4, 256), 300)])
def test_a_token_s_attention_is_the_same_bits_in_every_step(heads: tuple[int, int, int], window: int | None) -> None:
    """As part of a whole prompt, of chunks that begin anywhere, and alone among rows of any number and width."""
    length = 1500
    inputs = Inputs(torch.bfloat16, GPU)
    kv, table_RB, _ = paged_kv(inputs, rows_of([(0, 0, length)], GPU), heads[1], heads[2])
    q_THD = inputs.normal(length, heads[0], heads[2])

    def attended(q: torch.Tensor, specs: list[RowSpec], spare: int = 0) -> torch.Tensor:
        table = torch.nn.functional.pad(table_RB.expand(len(specs), -1), (0, spare), value=-1)
        return attention(q, kv, table, rows_of(specs, GPU), 0.09, window)

    whole_THD = attended(q_THD, [(0, 0, length)])
    for begin in (7, 256, 333, length - 3):
        assert torch.equal(attended(q_THD[begin:], [(0, begin, length - begin)]), whole_THD[begin:]), begin
    chosen = [0, 5, 63, 64, 255, 256, 300, 511, 577, length - 1]
    for repeats in (1, 13):
        specs: list[RowSpec] = [(i, at, 1) for i, at in enumerate(chosen * repeats)]
        for spare in (0, 1000):
            assert torch.equal(attended(q_THD[chosen * repeats], specs, spare), whole_THD[chosen * repeats])
    (alone,) = attended(q_THD[577:578], [(0, 577, 1)])
    assert torch.equal(alone, whole_THD[577])


def test_a_token_s_keys_are_the_same_bits_among_any_number() -> None:
    inputs = Inputs(torch.bfloat16, GPU)
    angle_PW = inputs.uniform(0, 6, 300, 64)
    rotary = RotaryTable(angle_PW.cos(), angle_PW.sin())
    norms = HeadNorms(q_D=inputs.normal(128).float(), k_D=inputs.normal(128).float(), eps=1e-6)
    qkv_TE = inputs.normal(300, 48 * 128)
    positions_T = torch.arange(300, device=GPU)

    def rotated(first: int, count: int) -> list[torch.Tensor]:
        kv, _, slots_T = paged_kv(Inputs(torch.bfloat16, GPU, 1), rows_of([(0, 0, 300)], GPU), 8, 128)
        part = slice(first, first + count)
        q_THD = rotary_kv_write(qkv_TE[part], 32, positions_T[part], rotary, norms, slots_T[part], kv)
        block, offset = slots_T[part] // 16, slots_T[part] % 16
        return [q_THD, kv.k_NKDS[block, :, :, offset], kv.v_NKSD[block, :, offset]]

    whole = rotated(0, 300)
    for first, count in ((0, 1), (17, 1), (100, 33), (37, 200)):
        for got, want in zip(rotated(first, count), whole, strict=True):
            assert torch.equal(got, want[first : first + count])
